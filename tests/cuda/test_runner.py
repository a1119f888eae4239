"""An engine on the GPU: which steps go to the graph, and that nobody can tell from the bits."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import DATA
from cuda.tiny import write_tiny
from moeflux import Segment, Trace, load
from moeflux.backends.base import Tiers
from moeflux.backends.cuda.costs import model_costs, slot_bytes
from moeflux.backends.cuda.device import driver_version
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.cuda.pool import pool_shape
from moeflux.backends.cuda.runner import CudaRunner
from moeflux.core.errors import DeviceError, NumericError
from moeflux.session.prefixes import PrefixStore

ON_GPU = torch.cuda.is_available()
IDS = [3, 60, 17] if not ON_GPU else np.random.default_rng(5).integers(0, 64, 300).tolist()
N = 1 if not ON_GPU else 60  # of them decoded; the interpreter takes seconds for each
CONTEXT = 512 if ON_GPU else 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def engine(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moeflux.backends.cuda.backend.CudaOps", lambda device: CudaOps(device, poison=True))
        opened = load(folder, backend="cuda", context=CONTEXT, sequences=2, prefixes="64MiB")
    with opened:
        yield opened


@pytest.fixture(scope="module")
def whole(engine):
    """Logits of every position, through the composed blocks."""
    with np.errstate(all="ignore"):
        return engine.score(IDS)


def count_steps(monkeypatch, engine):
    steps = []
    decoder = engine.model.runner.decoder
    run = decoder.step
    monkeypatch.setattr(decoder, "step", lambda *given: steps.append(given[1]) or run(*given))
    return steps


def test_prompts_are_composed_and_tokens_are_graphs(engine, whole, monkeypatch):
    steps = count_steps(monkeypatch, engine)
    sequence = engine.sequence()
    rows = [engine.prefill(sequence, IDS[:-N])]
    assert steps == []
    rows += [engine.forward(Segment(sequence, [token]))[0][0] for token in IDS[-N:]]
    assert steps == list(range(len(IDS) - N, len(IDS)))
    np.testing.assert_array_equal(rows, whole[-N - 1 :])
    assert engine.notes == ()
    used = engine.states.used
    del sequence  # which the decoder does not hold on to
    assert engine.states.used < used


def test_sequences_in_company_restored_and_traced(engine, whole):
    """Two at once, one goes back to a checkpoint, one is traced on the way: every row is that of one chunk."""
    start = len(IDS) - 2
    one, two = engine.sequence(), engine.sequence()
    engine.prefill(one, IDS[:start])
    engine.prefill(two, IDS[: start + 1])
    one.checkpoint()
    first, second = engine.forward(Segment(one, [IDS[start]]), Segment(two, [IDS[start + 1]]))
    np.testing.assert_array_equal(first[0], whole[start])
    np.testing.assert_array_equal(second[0], whole[start + 1])
    one.restore(start)
    trace = Trace()
    (again,) = engine.forward(Segment(one, [IDS[start]], trace=trace))
    np.testing.assert_array_equal(again, first)
    assert (1, "router_ids") in trace
    if ON_GPU:
        (last,) = engine.forward(Segment(one, [IDS[start + 1]]))
        np.testing.assert_array_equal(last[0], whole[start + 1])


def content(states):
    return [(p.name, p.shape, [np.asarray(part).tobytes() for part in p.parts]) for s in states for p in s.copy_out()]


@pytest.fixture(scope="module")
def some(engine):
    """A sequence of all tokens but the last."""
    sequence = engine.sequence()
    with np.errstate(all="ignore"):
        engine.forward(Segment(sequence, IDS[:-1], "none"))
    return sequence


def test_states_go_to_files_and_come_back(engine, whole, some, tmp_path):
    assert engine.identity.backend == "cuda"
    assert engine.identity.numerics.startswith("cuda-")
    engine.save(some, tmp_path / "state", sampler={"seed": 1})
    again, sampler = engine.load(tmp_path / "state")
    assert (again.tokens, sampler) == (IDS[:-1], {"seed": 1})
    assert content(again.states) == content(some.states)
    np.testing.assert_array_equal(engine.forward(Segment(again, IDS[-1:]))[0][0], whole[-1])


def test_prefixes_are_kept_on_disk(engine, some, tmp_path):
    store = PrefixStore(engine, folder=tmp_path)
    assert store.put_sequence(some)
    store.flush()
    store.close()
    store = PrefixStore(engine, folder=tmp_path)
    ((length, entry),) = store.candidates(IDS, len(IDS) - 1)
    assert length == len(some)
    assert content(store.take(entry, length).states) == content(some.states)
    store.close()


@pytest.mark.skipif(not ON_GPU, reason="the interpreter takes minutes")
def test_a_generation(engine):
    tokens = [token.id for token in engine.generate(IDS[:2], max_tokens=12, temperature=0)]
    expected, ids = [], IDS[:2]
    for _ in range(12):
        expected.append(int(np.argmax(engine.score(ids)[-1])))
        ids = [*ids, expected[-1]]
    assert tokens == expected


PLACES = [(2, 1, True), (2, 1, False), *([(3, 2, True), (1, 0, False)] if ON_GPU else [])]


@pytest.mark.parametrize(("per_layer", "staged", "records"), PLACES)
def test_bits_do_not_depend_on_where_experts_are(engine, whole, per_layer, staged, records):
    """From fewer slots than experts: fetched by the device itself from host memory, or layer by layer from the store."""
    model = engine.model
    tiers = Tiers(CONTEXT, 2 * per_layer, staged, records)
    runner = CudaRunner(model.ops, model, tiers)
    assert (runner.decoder is not None) == records
    assert bool(runner.notes) == (not records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_model", replace(model, runner=runner))
        sequence = engine.sequence()
        rows = [engine.prefill(sequence, IDS[:-N])]
        rows += [engine.forward(Segment(sequence, [token]))[0][0] for token in IDS[-N:]]
    np.testing.assert_array_equal(rows, whole[-N - 1 :])


def test_a_budget_of_device_memory(folder, engine, whole):
    """Fewer bytes than all experts need: the plan says so, and the bits are the same."""
    planned = engine.plan.vram
    assert planned.resident
    slot = slot_bytes(engine.spec)
    assert slot == pool_shape(engine.model.trunk).slot_words * 4
    budget = planned.total - slot
    with load(folder, backend="cuda", context=CONTEXT, sequences=2, prefixes="64MiB", vram=budget) as small:
        vram = small.plan.vram
        assert 4 <= vram.n_slots < 8
        assert vram.n_staged >= 2
        assert vram.total <= budget
        assert small.plan.memory.records == 8 * slot
        if ON_GPU:
            np.testing.assert_array_equal(small.score(IDS), whole)


def test_too_little_device_memory_is_said_with_the_numbers(folder, monkeypatch):
    with pytest.raises(DeviceError, match=r"are too little: trunk .* scratch .* experts of one token") as error:
        load(folder, backend="cuda", context=CONTEXT, vram="100MB")
    assert "option 'vram'" in str(error.value)
    assert "from " in error.value.hint
    if not ON_GPU:  # others took it
        monkeypatch.setattr("moeflux.backends.cuda.device.Device.free_bytes", 10**9)
        with pytest.raises(DeviceError, match=r"8 GB asked for, .* has 1 GB of"):
            load(folder, backend="cuda", context=CONTEXT, vram="8GB")


@pytest.mark.skipif(not ON_GPU, reason="numpy warns of NaN inside of the interpreter")
def test_broken_states_are_noticed(engine):
    sequence = engine.sequence()
    for state in sequence.states:
        for array in state.arrays.values():
            array.fill_(float("nan"))
    with pytest.raises(NumericError):
        engine.forward(Segment(sequence, IDS[:1]))
    assert not sequence.usable


def test_a_device_that_fails_amid_a_token_breaks_that_sequence_only(engine, whole, monkeypatch):
    one, two = engine.sequence(), engine.sequence()
    two.adopt(one.snapshot())

    def fail(*_):
        raise torch.OutOfMemoryError("somebody took it")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model.runner.decoder, "step", fail)
        with pytest.raises(DeviceError, match=r"too little memory on .*a decoding step.* free"):
            engine.forward(Segment(one, IDS[:1]))
    assert not one.usable
    assert two.usable
    one.clear()
    for sequence in (one, two) if ON_GPU else (two,):
        np.testing.assert_array_equal(engine.forward(Segment(sequence, IDS[:1]))[0][0], whole[0])


def test_memory_that_others_took_meanwhile_is_no_end_of_auto(folder, monkeypatch):
    """Planned, but when the weights are loaded it is gone: the processor computes, which is said."""

    def gone(*_, **__):
        raise DeviceError("too little memory on the GPU: 1 GB for expert slots", where="backend 'cuda'")

    monkeypatch.setattr("moeflux.backends.registry.gpu_in_sight", lambda: True)
    monkeypatch.setattr("moeflux.backends.cuda.runner.fill_pool", gone)
    with load(folder, context=64) as engine:
        assert engine.config.backend == "native"
        assert engine.plan.vram is None
        assert len(engine.notes) == 1
        assert "the GPU is not used" in engine.notes[0]
        assert len(engine.score([1, 2])) == 2
    with pytest.raises(DeviceError, match="1 GB for expert slots"):
        load(folder, backend="cuda", context=64)


def test_a_model_without_a_step_says_so():
    with load(DATA / "mlx" / "qwen3_moe-4bit-f32", backend="cuda", context=64) as engine:
        assert engine.model.runner.decoder is None
        assert any("block by block" in note for note in engine.notes)


def test_costs_grow_with_the_chunk(engine):
    small, large = (model_costs(engine.spec, engine.sizes, chunk) for chunk in (32, 4096))
    assert small.vram.trunk == large.vram.trunk >= engine.sizes.trunk
    assert small.vram.scratch < large.vram.scratch
    assert not small.ram.keeps_states


@pytest.mark.parametrize("options", ["vram=0", "backend='native'", "backend='auto'"])
def test_without_a_gpu_torch_is_never_imported(options):
    if ON_GPU and "auto" in options:
        pytest.skip("there is one")
    folder = str(DATA / "mlx" / "qwen3_moe-4bit-f32")
    code = f"import sys, moeflux; moeflux.load({folder!r}, {options}).close(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_drivers_version(tmp_path):
    path = tmp_path / "version"
    assert driver_version(path) is None
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\n")
    assert driver_version(path) == "570.86.15"
    path.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    assert driver_version(path) == "580.65.06"


@pytest.mark.skipif(not ON_GPU, reason="the interpreter takes minutes")
def test_random_places_cuts_and_company(tmp_path):
    """Any number of slots, with records or without, prompts cut anywhere, two sequences: always the bits of one chunk."""
    folder = write_tiny(tmp_path / "m", num_experts=16, num_experts_per_tok=4, num_hidden_layers=4)
    rng = np.random.default_rng(11)
    with load(folder, backend="cuda", context=512, sequences=2) as engine:
        model = engine.model
        ids = rng.integers(0, 64, 96).tolist()
        expected = engine.score(ids)
        for trial in range(40):
            per_layer, staged = int(rng.integers(4, 17)), int(rng.integers(1, 17))
            tiers = Tiers(512, 4 * per_layer, staged, bool(trial % 3))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine, "_model", replace(model, runner=CudaRunner(model.ops, model, tiers)))
                one, two = engine.sequence(), engine.sequence()
                cut, end = int(rng.integers(1, 60)), int(rng.integers(62, 96))
                engine.prefill(one, ids[:cut])
                engine.prefill(two, ids[: end - 20])
                for i in range(20):
                    if cut + i < end:
                        a, b = engine.forward(Segment(one, [ids[cut + i]]), Segment(two, [ids[end - 20 + i]]))
                        np.testing.assert_array_equal(a[0], expected[cut + i], err_msg=str(tiers))
                        np.testing.assert_array_equal(b[0], expected[end - 20 + i], err_msg=str(tiers))
