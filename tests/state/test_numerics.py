"""A state is used again only where it would have been computed with the same bits."""

from __future__ import annotations

import dataclasses
from functools import cache
from hashlib import blake2b

import numpy as np
import pytest

import moeflux
from backends.test_linear import CODECS, inputs, random_matrix
from conftest import DATA
from moeflux.backends.native.ops import NativeOps, available_isas
from moeflux.backends.numerics import NUMERICS_VERSION
from moeflux.core.errors import SnapshotError
from moeflux.formats.snapshot import Section, SnapshotFile, write_snapshot
from moeflux.session.entry import Limits
from moeflux.session.prefixes import PrefixStore
from moeflux.session.session import Session
from state.families import FAMILIES, HYBRID, LATENT, opened, text

OTHERS = [isa for isa in available_isas() if isa != "generic"]

# Of a state and its logits, by numerics class and NUMERICS_VERSION. Where a row has to change, the version must too.
KNOWN = {
    ("native-fma-glibc-2.36-f3939872", 1): {HYBRID: "079c9bfea0bbc5b5", LATENT: "4cc5c69aecdcd870"},
    ("native-generic-glibc-2.36-f3939872", 1): {HYBRID: "9c7d7a9c51ddec83", LATENT: "6a25dbf00cff97cf"},
}


@cache
def on(name, isa, kv="bf16"):
    return moeflux.load(DATA / "mlx" / name, threads=1, context=1024, prefixes="10MB", isa=isa, kv=kv)


def bits(engine):
    """Of the state after some tokens and of the logits."""
    sequence = engine.sequence()
    digest = blake2b(engine.prefill(sequence, text(300)).tobytes(), digest_size=8)
    for state in sequence.states:
        for part in (*(part for rows in state.rows.values() for part in rows.parts()), *state.arrays.values()):
            digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("kv", ["bf16", "f32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_engines_of_one_class_give_the_same_bits(name, kv):
    found = {}
    for isa in available_isas():
        engine = on(name, isa, kv)
        found.setdefault(engine.identity.numerics, set()).add(bits(engine))
    assert all(len(those) == 1 for those in found.values()), found


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_products_of_one_class_have_the_same_bits(codec):
    """Float and block FP8 weights too, which the models above have few of."""
    for rows, cols, tokens in ((70, 256, 1), (130, 640, 5), (16, 384, 13)):
        matrix, x, found = random_matrix(codec, rows, cols), inputs(tokens, cols), {}
        for isa in available_isas():
            ops = NativeOps(1, isa)
            found.setdefault(ops.numerics, set()).add(ops.linear(x, ops.load_matrix(matrix)).tobytes())
        assert all(len(those) == 1 for those in found.values())


@pytest.mark.parametrize("isa", available_isas())
def test_other_bits_need_another_version(isa):
    """Fails when arithmetic was changed and NUMERICS_VERSION was not."""
    known = KNOWN.get((on(HYBRID, isa).identity.numerics, NUMERICS_VERSION))
    if known is None:
        pytest.skip("these bits are not known for this machine's libraries")
    assert {name: bits(on(name, isa)) for name in (HYBRID, LATENT)} == known


@pytest.mark.skipif(not OTHERS, reason="there is one class here")
def test_a_state_of_another_class_is_refused(tmp_path):
    generic, other = on(HYBRID, "generic"), on(HYBRID, OTHERS[0])
    path = tmp_path / "state"
    sequence = generic.sequence()
    generic.prefill(sequence, text(20))
    generic.save(sequence, path)
    with pytest.raises(SnapshotError, match=r"arithmetic 'native-generic.*this is 'native-fma") as caught:
        other.load(path)
    assert "run the prompt again" in caught.value.hint
    assert generic.load(path)[0].tokens == text(20)


@pytest.mark.skipif(not OTHERS, reason="there is one class here")
def test_a_store_does_not_see_states_of_another_class(tmp_path):
    generic, other = on(HYBRID, "generic"), on(HYBRID, OTHERS[0])
    store = PrefixStore(generic, Limits(10**7), tmp_path)
    Session(generic, store).sync(text(30), boundaries=[20])
    store.close()
    store = PrefixStore(other, Limits(10**7), tmp_path)
    assert store.lengths == ()
    session = Session(other, store)
    assert session.sync([*text(30), 1]).read == 0
    fresh = opened(HYBRID, isa=OTHERS[0])
    np.testing.assert_array_equal(session.logits, fresh.score([*text(30), 1])[-1])
    store.close()
    again = PrefixStore(generic, Limits(10**7), tmp_path)
    assert again.lengths
    again.close()


def rewritten(path, change):
    with SnapshotFile(path) as file:
        about = dict(file.about)
        sections = [Section(name, e.dtype, e.shape, [file.read(name)]) for name, e in file.sections.items()]
    change(about)
    write_snapshot(path, about, sections)


def test_files_of_other_versions_are_refused(tmp_path):
    engine = opened(HYBRID)
    path = tmp_path / "state"
    engine.save(engine.sequence(), path)
    rewritten(path, lambda about: about.update(numerics_version=NUMERICS_VERSION + 1))
    with pytest.raises(SnapshotError, match="arithmetic of version") as caught:
        engine.load(path)
    assert caught.value.hint
    rewritten(path, lambda about: (about.pop("numerics"), about.pop("numerics_version")))
    with pytest.raises(SnapshotError, match="older moeflux"):
        engine.load(path)


def test_float_activations_are_another_class():
    assert NativeOps(1, exact=True).numerics != NativeOps(1).numerics
    assert dataclasses.replace(opened(HYBRID).identity, numerics="x") != opened(HYBRID).identity
