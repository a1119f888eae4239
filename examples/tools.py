"""A tool that the model calls, and its result sent back. The model must be one whose template has tools.

moeflux serve MODEL &
python examples/tools.py [http://127.0.0.1:8080]
"""

import json
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = OpenAI(base_url=f"{url}/v1", api_key="not-needed-without-a-key")


def weather(city: str) -> str:
    return f"It is sunny in {city}."


parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [
    {"type": "function", "function": {"name": "weather", "description": "The weather in a city.", "parameters": parameters}}
]
messages = [{"role": "user", "content": "What is the weather in Oslo?"}]

answer = client.chat.completions.create(model="any", messages=messages, tools=tools, tool_choice="required", max_tokens=200)
said = answer.choices[0].message
messages.append(said.model_dump(exclude_none=True))
for call in said.tool_calls or ():
    result = weather(**json.loads(call.function.arguments))
    print(call.function.name, call.function.arguments, "->", result)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

answer = client.chat.completions.create(model="any", messages=messages, tools=tools, max_tokens=200)
print(answer.choices[0].message.content)
