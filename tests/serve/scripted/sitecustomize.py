"""A model that does as it is told: the engine computes every step, and the logits are then replaced by a script's.

Python imports this by itself where its folder is on the path: see `serve/scripted_model.py`. The script of an answer follows
from its prompt: behind a question a call, behind a result words.
"""

from __future__ import annotations

import numpy as np

from moeflux.session.writer import Writer

CALL = "<tool_call>\n<function=read>\n<parameter=path>\nfile {n}.txt\n</parameter>\n</function>\n</tool_call>"
WORDS = "It says {n}: the quick brown fox.\nThat is all."
THOUGHT = "I look at step {n}.\n</think>\n\n"

_take, _init = Writer.take, Writer.__init__


def begin(self, text, request, *rest):
    _init(self, text, request, *rest)
    prompt = text.tokenizer.decode(request.ids)
    n = prompt.count("<|im_start|>assistant")
    turn = prompt.rpartition("<|im_start|>user")[2]
    script = WORDS if "<tool_response>" in turn or "<tools>" in turn or "read" not in prompt else CALL
    thinks = prompt.rstrip().endswith("<think>")
    self._script = text, ((THOUGHT if thinks else "") + script).format(n=n), list[int]()


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
