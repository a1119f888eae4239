"""OpenAI's Responses: one that runs in the background, read again from where the connection broke.

moeflux serve &
python examples/responses.py [http://127.0.0.1:8080]
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = OpenAI(base_url=f"{url}/v1", api_key="not-needed-without-a-key")

story = client.responses.create(
    model="any", input="Tell me a story about a fox.", max_output_tokens=120, background=True, stream=True
)
seen = -1
for event in story:
    seen = event.sequence_number
    if event.type == "response.created":
        id = event.response.id
    if event.type == "response.output_text.delta":
        print(event.delta, end="", flush=True)
        if seen > 20:
            break  # as if the connection were lost
story.close()

print("\n-- connected again --")
for event in client.responses.retrieve(id, stream=True, starting_after=seen):
    if event.type == "response.output_text.delta":
        print(event.delta, end="", flush=True)
done = client.responses.retrieve(id)
print(f"\n[{done.status}] {done.usage.input_tokens} tokens in, {done.usage.output_tokens} out")
