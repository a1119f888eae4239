"""Anthropic's SDK: a stream with thoughts, a tool, and what the prompt cache did.

moeflux serve MODEL --prefixes 2GiB &
python examples/anthropic_messages.py [http://127.0.0.1:8080]
"""

import sys

from anthropic import Anthropic

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = Anthropic(base_url=url, api_key="not-needed-without-a-key")

kept = {"type": "ephemeral", "ttl": "1h"}  # at least so long, and longer while there is room
system = [{"type": "text", "text": "You answer in one sentence. " * 20, "cache_control": kept}]
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"name": "weather", "description": "The weather in a city.", "input_schema": schema}]
messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
previous = None

for choice in ({"type": "tool", "name": "weather"}, {"type": "auto"}):
    with client.messages.stream(
        model="any", max_tokens=300, system=system, tools=tools, tool_choice=choice, messages=messages,
        extra_body={"diagnostics": {"previous_message_id": previous}},
    ) as stream:  # fmt: skip
        for event in stream:
            if event.type == "text":
                print(event.text, end="", flush=True)
        answer = stream.get_final_message()
    usage = answer.usage
    print(
        f"\n[{answer.stop_reason}] read {usage.cache_read_input_tokens}, kept {usage.cache_creation_input_tokens},", end=" "
    )
    print(f"else {usage.input_tokens}; not known because: {answer.diagnostics}")
    previous = answer.id
    messages.append({"role": "assistant", "content": answer.content})
    uses = [block for block in answer.content if block.type == "tool_use"]
    for use in uses:
        print(use.name, use.input)
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "It is sunny."} for use in uses]
    messages.append({"role": "user", "content": results or "And tomorrow?"})
