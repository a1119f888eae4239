"""Whatever was done to a sequence, its next logits are those of a fresh one with the same tokens, bit for bit."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from moeflux import Segment
from moeflux.core.errors import CutError
from moeflux.session.entry import Limits
from moeflux.session.prefixes import PrefixStore
from moeflux.session.session import Session
from state.families import FAMILIES, fresh_logits, opened, text

BRANCH = st.integers(0, 2)
LENGTHS = st.one_of(st.integers(1, 12), st.integers(240, 290))  # within a block of state and across its edge


class Crash(Exception):
    """As if the process had ended there."""


class History(RuleBasedStateMachine):
    name = FAMILIES[0]
    sessions = Bundle("sessions")

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="moeflux-test-"))
        self.engine = opened(self.name, prefixes="4MB")
        self.prefixes = None
        self.saved = {}
        self.all = []

    def teardown(self):
        if self.prefixes:
            self.prefixes.close()
        shutil.rmtree(self.folder)

    @initialize(kilobytes=st.sampled_from([1, 400, 4000]), disk=st.booleans())
    def open_store(self, kilobytes, disk):
        self.limits = Limits(kilobytes * 1000, disk_bytes=2_000_000)
        self.disk = disk
        self.prefixes = PrefixStore(self.engine, self.limits, self.folder / "prefixes" if disk else None)

    @rule(target=sessions, shared=st.booleans())
    def begin(self, shared):
        session = Session(self.engine, self.prefixes if shared else None, anchor_every=100)
        self.all.append(session)
        return session

    @rule(
        session=sessions, n=LENGTHS, branch=BRANCH, kept=st.integers(0, 300), cuts=st.lists(st.integers(1, 300), max_size=3)
    )
    def sync(self, session, n, branch, kept, cuts):
        """A text that begins as the one before, or as any of this branch."""
        begin = session.sequence.tokens[:kept]
        tokens = (begin + text(n, branch, len(begin)))[:500]
        usage = session.sync(tokens, breakpoints=cuts[:1], boundaries=cuts[1:])
        assert session.sequence.tokens == tokens
        assert usage.read < len(tokens)
        np.testing.assert_array_equal(session.logits, fresh_logits(self.name, tokens))

    @rule(session=sessions, n=st.integers(1, 5), branch=BRANCH)
    def advance(self, session, n, branch):
        if session.sequence.length < 600:
            for token in text(n, branch, session.sequence.length):
                logits = session.advance(token)
            np.testing.assert_array_equal(logits, fresh_logits(self.name, session.sequence.tokens))

    @rule(session=sessions)
    def anchor(self, session):
        session.anchor()

    @rule(session=sessions)
    def checkpoint(self, session):
        session.sequence.checkpoint()

    @rule(session=sessions, share=st.floats(0, 1))
    def truncate(self, session, share):
        sequence = session.sequence
        position = int(share * sequence.length)
        if sequence.nearest(position) == position:
            sequence.truncate(position)
            assert sequence.length == position
        else:
            with pytest.raises(CutError) as caught:
                sequence.truncate(position)
            below, above = caught.value.restorable
            assert below < position < above

    @rule(session=sessions, which=st.integers(0, 20))
    def restore(self, session, which):
        places = session.sequence.checkpoints
        if places:
            session.sequence.restore(places[which % len(places)])

    @rule(session=sessions, share=st.floats(0, 1.2))
    def restore_nearest(self, session, share):
        position = int(share * session.sequence.length)
        assert session.sequence.restore_nearest(position) <= position

    @rule(session=sessions, which=st.integers(0, 20))
    def forget(self, session, which):
        places = session.sequence.checkpoints
        if places:
            assert session.sequence.forget(places[which % len(places)])

    @rule(session=sessions, count=st.integers(1, 4))
    def limit(self, session, count):
        session.sequence.limit_checkpoints(count)
        assert len(session.sequence.checkpoints) <= count

    @rule(session=sessions, slot=st.integers(0, 1))
    def save(self, session, slot):
        self.engine.save(session.sequence, self.folder / f"{slot}.state", sampler=slot)
        self.saved[slot] = list(session.sequence.tokens)

    @rule(session=sessions, slot=st.integers(0, 1))
    def crash_while_saving(self, session, slot):
        """Between writing and renaming: what was there before is still there."""

        def crash(*_, **__):
            raise Crash

        self.prefixes.flush()  # its writer shall not be hit
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.replace", crash)
            patch.setattr("pathlib.Path.unlink", crash)
            with pytest.raises(Crash):
                self.engine.save(session.sequence, self.folder / f"{slot}.state")

    @precondition(lambda self: self.saved)
    @rule(session=sessions, which=st.integers(0, 1))
    def load(self, session, which):
        slot = sorted(self.saved)[which % len(self.saved)]
        session.sequence, sampler = self.engine.load(self.folder / f"{slot}.state")
        assert (session.sequence.tokens, sampler) == (self.saved[slot], slot)

    @precondition(lambda self: self.disk)
    @rule()
    def restart(self):
        """The store of a new process: what was written is found again."""
        self.prefixes.close()
        self.prefixes = PrefixStore(self.engine, self.limits, self.folder / "prefixes")
        for session in self.all:
            if session._prefixes is not None:
                session._prefixes = self.prefixes

    @rule(session=sessions, other=sessions, n=st.integers(1, 5))
    def branch_off(self, session, other, n):
        """Two go on from one state in different ways."""
        if other is session or session.sequence.length > 600:
            return
        other.sequence.adopt(session.sequence.snapshot())
        for s, branch in ((session, 3), (other, 4)):
            s.advance(text(1, branch, s.sequence.length)[0])
        for s, branch in ((session, 3), (other, 4)):
            for token in text(n, branch, s.sequence.length):
                logits = s.advance(token)
            np.testing.assert_array_equal(logits, fresh_logits(self.name, s.sequence.tokens))

    @rule(session=sessions, other=sessions, branch=BRANCH)
    def side_by_side(self, session, other, branch):
        """Two in one batch, where each must not see the other."""
        pair = [session] if other is session else [session, other]
        if all(s.sequence.length < 600 for s in pair):
            segments = [Segment(s.sequence, text(2 + i, branch, s.sequence.length)) for i, s in enumerate(pair)]
            for s, logits in zip(pair, self.engine.forward(*segments), strict=True):
                np.testing.assert_array_equal(logits[0], fresh_logits(self.name, s.sequence.tokens))

    @invariant()
    def check_budget(self):
        if self.prefixes:
            assert self.prefixes.ram_bytes <= self.limits.ram_bytes


@pytest.mark.parametrize("name", FAMILIES)
def test_random_histories(name):
    machine = type("Machine", (History,), {"name": name})
    quick = settings(max_examples=30, stateful_step_count=25, suppress_health_check=list(HealthCheck), deadline=None)
    run_state_machine_as_test(machine, settings=quick)
