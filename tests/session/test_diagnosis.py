"""Why a prompt was not known: what changed, where, and what that cost."""

from __future__ import annotations

import pytest

from moeflux.session.diagnosis import MOST_KEPT, Fingerprint, Ledger, compare
from moeflux.session.prompt import Conversation

TOOL = {"name": "look", "parameters": {"type": "object"}}
SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "hello"}
CALL = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": {"a": 1}}}]}
BEFORE = [SYSTEM, USER, CALL]


def taken(messages=BEFORE, tools=(TOOL,), ids=range(40), said=36, model="m", **more):
    return Fingerprint.of(model, Conversation(messages, list(tools), **more), list(ids), said)


def at(n, *new):
    return [*range(n), *new, *[7] * 50]


@pytest.mark.parametrize(
    ("now", "what", "index", "position"),
    [
        ({"model": "other", "ids": at(0)}, "model", 0, 0),
        ({"tools": [{**TOOL, "name": "see"}], "ids": at(3)}, "tools", 0, 3),
        ({"tools": [TOOL, {**TOOL, "name": "see"}], "ids": at(5)}, "tools", 1, 5),
        ({"messages": [{**SYSTEM, "content": "Be rude."}, USER, CALL], "ids": at(9)}, "system", 0, 9),
        ({"messages": [SYSTEM, {**USER, "content": "hi"}, CALL], "ids": at(12)}, "messages", 0, 12),
        ({"messages": [SYSTEM, USER], "ids": at(20)}, "messages", 1, 20),
        ({"variables": {"enable_thinking": False}, "ids": at(30)}, "variables", 0, 30),
        ({"ids": at(30)}, "messages", None, 30),  # the template shows them in another way
    ],
)
def test_what_changed(now, what, index, position):
    difference = compare(taken(), taken(**now))
    assert (difference.what, difference.index, difference.position) == (what, index, position)
    assert difference.missed == 36 - position
    assert difference.where


def test_what_goes_on_did_not_change():
    """Also where only the prompt for the answer differs, and where a client writes the same in another way."""
    assert compare(taken(), taken()) is None
    assert compare(taken(), taken([*BEFORE, {"role": "tool", "content": "x"}], ids=at(36))) is None
    spelled = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": '{"a":1}'}}]}
    same = [SYSTEM, {**USER, "content": [{"type": "text", "text": "hello", "keep_s": 5}]}, spelled]
    assert taken(same).parts == taken().parts


def test_a_ledger_forgets_the_oldest():
    ledger = Ledger()
    for i in range(MOST_KEPT + 3):
        ledger.remember(f"m{i}", taken())
    assert ledger.find("m0") is None
    assert ledger.find(f"m{MOST_KEPT + 2}") is not None
