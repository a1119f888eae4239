"""Output that must fit a schema: a Pydantic class, a choice and a regular expression.

moeflux serve &
python examples/structured_output.py [http://127.0.0.1:8080]
"""

import sys

from openai import OpenAI
from pydantic import BaseModel, Field

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = OpenAI(base_url=f"{url}/v1", api_key="not-needed-without-a-key")


class Animal(BaseModel):
    name: str = Field(max_length=20)
    legs: int = Field(ge=0, le=100)


messages = [{"role": "user", "content": "Name an animal."}]
answer = client.chat.completions.parse(model="any", messages=messages, response_format=Animal, max_tokens=200)
print(answer.choices[0].message.parsed)

for constraint in ({"choice": ["yes", "no"]}, {"regex": "[A-Z][a-z]{2,8}"}):
    answer = client.chat.completions.create(
        model="any", messages=messages, max_tokens=20, extra_body={"structured_outputs": constraint}
    )
    print(constraint, "->", answer.choices[0].message.content)
