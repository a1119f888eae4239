"""What a person sees while a prompt runs, and what is planned for a conversation."""

from __future__ import annotations

import pytest

from moeflux.cli import progress
from moeflux.cli.talk import opened
from moeflux.plan.inspect import inspect_model
from moeflux.runtime.prefill import PrefillProgress
from moeflux.session.demo import demo_model

BAR = progress._bar


@pytest.mark.parametrize(("done", "total", "shown"), [(4, 4, False), (9, 9000, True), (390, 400, False), (1, 400, True)])
def test_a_short_prompt_has_no_bar(monkeypatch, done, total, shown):
    """A bar wipes the line that it is on: one that comes when all is done would wipe what stands there."""
    made = []
    monkeypatch.setattr(progress, "_bar", lambda *columns: made.append(BAR(*columns)) or made[-1])
    bar = progress.PromptBar()
    bar._update(PrefillProgress(done, total, 0, seconds=1.0))
    assert bool(made) == shown
    bar.close()


def test_checkpoints_of_a_conversation_are_planned():
    state = inspect_model(demo_model()).sizes.state_per_sequence
    assert state > 0
    with opened(None, {"threads": 1}, "plain") as engine:
        assert engine.plan.memory.checkpoints >= 2 * state
        assert engine.plan.memory.constraints == 0
