"""A model that does as it is told: the engine computes every step, and the logits are then replaced by a script's.

Python imports this by itself where its folder is on the path: see `serve/scripted_model.py`. The script of an answer follows
from its prompt: behind a question a call of a tool that it knows, behind a result words.
"""

from __future__ import annotations

import json
import os

import numpy as np

from moeflux.session.writer import Writer
from moeflux.text.messages import Arguments

TOOLS = (
    "bash",
    "Bash",
    "shell",
    "shell_command",
    "exec_command",
    "run_shell_command",
    "read",
)  # the first one that there is
WORDS = "It says {n}: the quick brown fox.\nThat is all."
THOUGHT = "I look at step {n}.\n</think>\n\n"
COMMAND = os.environ.get("SCRIPTED_COMMAND", "true")

_take, _init = Writer.take, Writer.__init__


def begin(self, text, request, *rest):
    _init(self, text, request, *rest)
    prompt = text.tokenizer.decode(request.ids)
    n = prompt.count("<|im_start|>assistant")
    turn = prompt.rpartition("<|im_start|>user")[2]
    schemas = getattr(request.splitter, "_schemas", {})
    tool = next((name for name in (*TOOLS, *schemas) if name in schemas), None)
    script = WORDS.format(n=n) if tool is None or "<tool_response>" in turn else call(text, tool, schemas[tool], n)
    thinks = prompt.rstrip().endswith("<think>")
    self._script = text, (THOUGHT.format(n=n) if thinks else "") + script, list[int]()


def call(text, name, schema, n):
    """With the parameters that it needs, in their order and in the model's own syntax."""
    needed = {*schema.get("required", ()), "command", "cmd"}
    values = {key: value(key, inner, n) for key, inner in schema.get("properties", {}).items() if key in needed}
    return text.chat.call_grammars.frame.write([(name, Arguments(values, json.dumps(values)))])


def value(key, schema, n):
    if key in ("command", "cmd"):
        return ["bash", "-c", COMMAND] if schema.get("type") == "array" else COMMAND
    return {"boolean": False, "integer": 1, "number": 1}.get(schema.get("type"), f"file {n}.txt")


def take(self, logits):
    text, script, ids = self._script
    written = text.tokenizer.decode(ids)
    end = text.tokenizer.added["<|im_end|>"]
    left = script[len(written) :] if script.startswith(written) else ""
    row = np.full_like(logits, -30.0)
    row[end] = -20.0
    row[text.tokenizer.encode_rendered(left)[0] if left else end] = 30.0
    turn = _take(self, row)
    ids.extend(event.id for event in turn.events)
    return turn


Writer.__init__, Writer.take = begin, take
