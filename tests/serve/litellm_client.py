"""Run by `test_clients.py` in an environment of its own: `python litellm_client.py URL`."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network first

import litellm

URL = sys.argv[1]
ASKED = {
    "model": "openai/any",
    "api_base": f"{URL}/v1",
    "api_key": "any-key",
    "messages": [{"role": "user", "content": "Tell me a story about a little fox."}],
    "max_tokens": 12,
    "temperature": 0,
}
litellm.telemetry = False

whole = litellm.completion(**ASKED)
pieces = list(litellm.completion(**ASKED, stream=True, stream_options={"include_usage": True}))
said = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
schema = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
structured = litellm.completion(**{**ASKED, "max_tokens": 60}, response_format=wanted)
try:
    litellm.completion(**{**ASKED, "messages": [{"role": "user", "content": "word " * 6000}]})
    failed = None
except litellm.exceptions.BadRequestError as error:
    failed = type(error).__name__
print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "said": said,
            "usage": whole.usage.prompt_tokens_details.cached_tokens is not None,
            "structured": json.loads(structured.choices[0].message.content),
            "failed": failed,
        }
    )
)
