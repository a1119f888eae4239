"""Chat with OpenAI's SDK: a whole answer, then a streamed one.

moeflux serve &
python examples/openai_chat.py [http://127.0.0.1:8080]
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = OpenAI(base_url=f"{url}/v1", api_key="not-needed-without-a-key")
messages = [{"role": "user", "content": "Tell me a story about a little fox."}]

answer = client.chat.completions.create(model="any", messages=messages, max_tokens=60)
print(answer.choices[0].message.content)
print(answer.usage)

# A slow model is best streamed: the SDK waits at most ten minutes for a whole answer.
for chunk in client.chat.completions.create(model="any", messages=messages, max_tokens=60, stream=True):
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
