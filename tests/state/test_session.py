"""Conversations: what is computed again, what is not, and that nobody can tell the difference."""

from __future__ import annotations

import dataclasses
import threading
from functools import partial

import numpy as np
import pytest

from moeflux.core.errors import CancelledError, InputError, WriteError
from moeflux.runtime.cancel import CancelFlag
from moeflux.session import disk
from moeflux.session.entry import Limits
from moeflux.session.prefixes import PrefixStore
from moeflux.session.session import PrefixUse, Session
from state import families
from state.families import FAMILIES, HYBRID, LATENT, PLAIN, fresh_logits, text

MB = 10**6


def opened(name):
    return families.opened(name, prefixes="100MB")


def synced(session, name, tokens, **options):
    usage = session.sync(tokens, **options)
    assert session.sequence.tokens == tokens
    np.testing.assert_array_equal(session.logits, fresh_logits(name, tokens))
    assert usage.read + usage.computed == len(tokens)
    assert usage.computed >= 1
    return usage


def store(name, ram=100 * MB, **options):
    return PrefixStore(opened(name), Limits(ram, **options))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_next_turn_computes_only_what_is_new(name):
    session = Session(opened(name))
    first = text(60)
    assert synced(session, name, first, boundaries=[20, 40, 60]) == PrefixUse(0, 60, 60)
    for token in (1, 2, 3):
        session.advance(token)
    assert session.anchor()
    assert synced(session, name, [*first, 1, 2, 3, *text(5, 1)]).read == 63


@pytest.mark.parametrize("name", FAMILIES)
def test_at_least_one_token_is_computed(name):
    session = Session(opened(name))
    synced(session, name, text(30), boundaries=[10, 29, 30])
    assert synced(session, name, text(30)).computed == 1
    assert synced(session, name, text(1)) == PrefixUse(0, 1 if session.sequence.cuttable else 0, 1)


def test_without_a_recurrent_state_any_prefix_is_read():
    for name in (PLAIN, LATENT):
        session = Session(opened(name))
        synced(session, name, text(50))
        assert synced(session, name, [*text(37), *text(5, 1)]).read == 37
        assert synced(session, name, text(9)).read == 8


def test_with_one_the_ladder_of_anchors_is_used():
    session = Session(opened(HYBRID))
    usage = synced(session, HYBRID, text(80), breakpoints=[25, 50, 75, 200], boundaries=[10, 20, 30, 40, 60])
    assert usage == PrefixUse(0, 75, 80)
    assert session.sequence.checkpoints == (10, 25, 40, 50, 60, 75)
    assert synced(session, HYBRID, [*text(74), *text(5, 1)]).read == 60
    assert synced(session, HYBRID, [*text(45), *text(5, 1)]).read == 40
    assert synced(session, HYBRID, text(5)).read == 0


def test_anchors_come_at_regular_distances():
    session = Session(opened(HYBRID), anchor_every=16)
    synced(session, HYBRID, text(50))
    assert session.sequence.checkpoints == (16, 32, 48)


@pytest.mark.parametrize("name", [HYBRID, PLAIN])
def test_sequences_share_prefixes(name):
    prefixes = store(name)
    one, two = Session(opened(name), prefixes), Session(opened(name), prefixes)
    synced(one, name, [*text(40), *text(10, 1)], breakpoints=[40])
    assert synced(two, name, [*text(40), *text(10, 2)], breakpoints=[40]).read == 40
    assert synced(one, name, [*text(40), *text(12, 2)]).read >= 40
    assert one.sequence.states is not two.sequence.states


def test_two_conversations_keep_their_caches_and_never_touch():
    prefixes = store(HYBRID)
    a, b = Session(opened(HYBRID), prefixes), Session(opened(HYBRID), prefixes)
    texts = {a: text(30, 1), b: text(30, 2)}
    for turn in range(4):
        for session, tokens in texts.items():
            usage = synced(session, HYBRID, tokens, boundaries=[len(tokens)])
            assert usage.read >= len(tokens) - 10 or turn == 0
            session.advance(turn)
            session.anchor()
            texts[session] = [*tokens, turn, *text(6, turn)]
    prefixes.drop(b.sequence.tokens)
    for n in prefixes.lengths:  # everything of b goes
        prefixes.drop(texts[b][:n])
    assert synced(a, HYBRID, texts[a]).read == len(texts[a]) - 6
    synced(b, HYBRID, texts[b])


def test_one_session_that_changes_between_conversations():
    """As a server does that has one sequence: the store brings each conversation back."""
    prefixes = store(HYBRID)
    session = Session(opened(HYBRID), prefixes)
    one, two = text(40, 1), text(40, 2)
    synced(session, HYBRID, one, boundaries=[30, 40])
    synced(session, HYBRID, two, boundaries=[30, 40])
    assert synced(session, HYBRID, [*one, 7], boundaries=[41]).read == 40
    assert synced(session, HYBRID, [*two, 7]).read == 40


@pytest.mark.parametrize("name", FAMILIES)
def test_three_long_prompts_share_nothing(name):
    prefixes = store(name)
    session = Session(opened(name), prefixes)
    for branch in (1, 2, 3):
        tokens = [branch, *text(299, branch)]
        assert synced(session, name, tokens, boundaries=[100, 300]).read == 0


def test_the_budget_holds_and_what_all_begin_with_stays():
    session = Session(opened(HYBRID), store(HYBRID))
    synced(session, HYBRID, text(20), boundaries=[20])
    one = session.sequence.snapshot()
    size = one.own_bytes + sum(block.nbytes for block in one.blocks())
    prefixes = store(HYBRID, ram=3 * size)
    session = Session(opened(HYBRID), prefixes)
    for branch in range(1, 8):
        usage = synced(session, HYBRID, [*text(20), *text(20, branch)], boundaries=[20, 40])
        assert usage.read == (20 if branch > 1 else 0)
        assert prefixes.ram_bytes <= 3 * size
    assert 20 in prefixes.lengths
    tiny = store(HYBRID, ram=10)
    session = Session(opened(HYBRID), tiny)
    assert synced(session, HYBRID, text(20), boundaries=[20]) == PrefixUse(0, 0, 20)
    assert (tiny.ram_bytes, tiny.lengths) == (0, ())


def test_what_is_not_used_expires():
    now = [1000.0]
    prefixes = PrefixStore(opened(HYBRID), Limits(100 * MB, ttl_seconds=300), clock=lambda: now[0])
    session = Session(opened(HYBRID), prefixes)
    synced(session, HYBRID, text(20, 1), boundaries=[20])
    now[0] += 200
    other = Session(opened(HYBRID), prefixes)
    assert synced(other, HYBRID, [*text(20, 1), 5]).read == 20  # and that is a use
    now[0] += 200
    assert synced(Session(opened(HYBRID), prefixes), HYBRID, [*text(20, 1), 6]).read == 20
    now[0] += 301
    assert synced(Session(opened(HYBRID), prefixes), HYBRID, [*text(20, 1), 6]).read == 0
    assert prefixes.ram_bytes == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_after_a_restart_from_disk(name, tmp_path):
    prefixes = PrefixStore(opened(name), Limits(100 * MB), tmp_path)
    synced(Session(opened(name), prefixes), name, text(60), boundaries=[50, 60])
    prefixes.close()
    again = PrefixStore(opened(name), Limits(100 * MB), tmp_path)
    assert again.ram_bytes == 0
    assert synced(Session(opened(name), again), name, [*text(60), 3]).read == 60
    assert again.ram_bytes > 0
    again.close()


def size_of(name, n):
    """Bytes of a state in memory, and in a file."""
    sequence = opened(name).sequence()
    opened(name).prefill(sequence, text(n))
    snapshot = sequence.snapshot()
    return snapshot.own_bytes + sum(block.nbytes for block in snapshot.blocks()), sequence.snapshot_bytes


def test_what_left_memory_comes_back_from_disk(tmp_path):
    one, _ = size_of(HYBRID, 20)
    prefixes = PrefixStore(opened(HYBRID), Limits(one), tmp_path)
    for branch in (1, 2):
        synced(Session(opened(HYBRID), prefixes), HYBRID, text(20, branch), boundaries=[20])
        prefixes.flush()
        assert prefixes.ram_bytes == one
    assert prefixes.disk_bytes > 0
    for branch in (1, 2, 1):
        assert synced(Session(opened(HYBRID), prefixes), HYBRID, [*text(20, branch), 1], boundaries=[20]).read == 20
        assert prefixes.ram_bytes == one
    prefixes.close()


def test_without_room_for_one_state_nothing_is_kept_or_read(tmp_path):
    """What waits to be written is in memory, and what is read too."""
    one, _ = size_of(HYBRID, 20)
    prefixes = PrefixStore(opened(HYBRID), Limits(one - 1), tmp_path)
    assert synced(Session(opened(HYBRID), prefixes), HYBRID, text(20), boundaries=[20]) == PrefixUse(0, 0, 20)
    prefixes.close()
    assert not list(tmp_path.rglob("*.state"))
    prefixes = PrefixStore(opened(HYBRID), Limits(one), tmp_path)
    synced(Session(opened(HYBRID), prefixes), HYBRID, text(20), boundaries=[20])
    prefixes.close()
    prefixes = PrefixStore(opened(HYBRID), Limits(one - 1), tmp_path)
    assert prefixes.lengths == (20,)
    assert synced(Session(opened(HYBRID), prefixes), HYBRID, [*text(20), 1]).read == 0
    assert (prefixes.ram_bytes, prefixes.lengths) == (0, (20,))  # it stays where it is
    prefixes.close()


def test_the_disk_budget_holds(tmp_path):
    prefixes = PrefixStore(opened(HYBRID), Limits(100 * MB, disk_bytes=10**12), tmp_path)
    session = Session(opened(HYBRID), prefixes)
    synced(session, HYBRID, text(20, 1), boundaries=[20])
    prefixes.flush()
    size = prefixes.disk_bytes
    prefixes.close()
    prefixes = PrefixStore(opened(HYBRID), Limits(MB, disk_bytes=3 * size), tmp_path)
    for branch in range(2, 8):
        synced(Session(opened(HYBRID), prefixes), HYBRID, text(20, branch), boundaries=[20])
        prefixes.flush()
        assert prefixes.disk_bytes <= 3 * size
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.state")) <= 3 * size
    assert len(prefixes.lengths) >= 2
    prefixes.close()


def test_damaged_and_unfinished_files_are_no_harm(tmp_path, caplog):
    prefixes = PrefixStore(opened(HYBRID), Limits(100 * MB), tmp_path)
    synced(Session(opened(HYBRID), prefixes), HYBRID, text(60), boundaries=[30, 50, 60])
    prefixes.close()
    files = sorted(tmp_path.rglob("*.state"), key=lambda path: path.stat().st_size)
    assert len(files) == 3
    data = bytearray(files[2].read_bytes())
    data[-1] ^= 1
    files[2].write_bytes(data)  # found when it is read
    files[1].write_bytes(files[1].read_bytes()[:100])  # found at once
    (files[0].parent / ".x.123.part").write_bytes(b"unfinished")
    again = PrefixStore(opened(HYBRID), Limits(100 * MB), tmp_path)
    assert again.lengths == (30, 60)
    assert synced(Session(opened(HYBRID), again), HYBRID, [*text(60), 1], boundaries=[61]).read == 30
    assert 60 not in again.lengths
    again.close()
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("error", [WriteError("no room"), ValueError("unforeseen")], ids=repr)
def test_a_full_disk_loses_nothing_but_itself(tmp_path, monkeypatch, error):
    prefixes = PrefixStore(opened(HYBRID), Limits(100 * MB), tmp_path)
    session = Session(opened(HYBRID), prefixes)

    def full(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("moeflux.session.disk.save_snapshot", full)
        synced(session, HYBRID, text(20), boundaries=[20])
        with pytest.raises(WriteError, match=str(error)):
            prefixes.flush()
    assert synced(Session(opened(HYBRID), prefixes), HYBRID, [*text(20), 1], boundaries=[21]).read == 20
    prefixes.flush()
    assert prefixes.disk_bytes > 0
    prefixes.close()


def test_a_queue_that_is_full_keeps_nobody_waiting(tmp_path, monkeypatch):
    go, save = threading.Event(), disk.save_snapshot
    monkeypatch.setattr("moeflux.session.disk.save_snapshot", lambda *a: (go.wait(20), save(*a))[1])
    prefixes = PrefixStore(opened(HYBRID), Limits(100 * MB), tmp_path)
    session = Session(opened(HYBRID), prefixes)
    for branch in range(9):
        synced(session, HYBRID, text(10, branch), boundaries=[10])
    assert len(prefixes.lengths) == 9
    go.set()
    prefixes.flush()  # what the disk had no time for is written now
    assert len(list(tmp_path.rglob("*.state"))) == 9
    prefixes.close()


def set_at(done, flag, now):
    if now.done == done:
        flag.set()


def test_cancelled_then_tried_again(monkeypatch):
    engine = opened(HYBRID)
    monkeypatch.setattr(engine, "plan", dataclasses.replace(engine.plan, chunk_tokens=10))
    for prefixes in (None, store(HYBRID)):
        session = Session(engine, prefixes)
        flag = CancelFlag()
        with pytest.raises(CancelledError, match="after 15 of 55"):
            session.sync(text(55), (), [15, 55], flag, partial(set_at, 15, flag))
        assert session.logits is None
        assert synced(session, HYBRID, text(55), boundaries=[15, 55]).read == 15
        session = Session(engine, prefixes)
        with pytest.raises(CancelledError):
            session.sync(text(55), cancelled=flag)
        synced(session, HYBRID, text(30, 3))


def test_texts_that_cannot_be_run_change_nothing():
    session = Session(opened(HYBRID))
    synced(session, HYBRID, text(10))
    for bad in ([], [1, 512], text(2000)):
        with pytest.raises(InputError):
            session.sync(bad)
    assert session.sequence.tokens == text(10)
