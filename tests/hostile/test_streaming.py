"""A drive or a person that interrupts a running model: a typed error, nothing hangs, and the engine goes on."""

from __future__ import annotations

import os
import shutil
import signal
import time

import numpy as np
import pytest

import moeflux
from moeflux import Segment
from moeflux.runtime.batch import Batch
from moeflux.runtime.forward import forward

NAME = "qwen3_5_moe_vl_fused-4bit-f32"
IDS = np.random.default_rng(2).integers(0, 512, 12).tolist()


@pytest.fixture
def copied(mlx, tmp_path):
    return shutil.copytree(mlx(NAME), tmp_path / "model")


@pytest.fixture
def expected(mlx):
    with moeflux.load(mlx(NAME)) as engine:
        return engine.score(IDS)


def weights(folder):
    return max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("reader", ["native", "python"])
@pytest.mark.parametrize("hints", ["none", "both"])
def test_a_file_that_is_cut_while_open(copied, expected, reader, hints):
    whole = weights(copied).read_bytes()
    with moeflux.load(copied, slots=2, reader=reader, hints=hints) as engine:
        engine.forward(Segment(engine.sequence(), IDS))
        os.truncate(weights(copied), 4096)
        sequence = engine.sequence()
        with pytest.raises(moeflux.ReadError, match=r"layer \d+, expert \d+") as caught:
            engine.forward(Segment(sequence, IDS))
        assert "download it again" in str(caught.value)
        with pytest.raises(moeflux.StateError, match="failed midway"):
            engine.forward(Segment(sequence, IDS))
        while {"filling", "failing"} & {slot[3] for slot in engine.model.experts.store.native.slots()}:
            time.sleep(0.001)  # reads of the file as it was
        with weights(copied).open("r+b") as file:  # the same file, whole again
            file.write(whole)
        np.testing.assert_array_equal(engine.score(IDS), expected)


def test_a_file_that_is_removed_while_open(copied, expected):
    """What was opened can still be read."""
    with moeflux.load(copied, slots=2) as engine:
        shutil.rmtree(copied)
        np.testing.assert_array_equal(engine.score(IDS), expected)


def test_a_broken_expert_names_itself(copied, expected):
    with moeflux.load(copied, slots=2) as engine:
        table = engine._checkpoint.experts(1)
        scales = table.extents(5)[1]
        path = engine._checkpoint.files.paths[scales.file]
        original = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(scales.offset)
            file.write(b"\xff" * scales.length)
        with pytest.raises(moeflux.FormatError, match=r"layer 1, expert 5.*NaN or infinity"):
            engine.score(np.random.default_rng(0).integers(0, 512, 400).tolist())  # enough to ask for every expert
        path.write_bytes(original)
        np.testing.assert_array_equal(engine.score(IDS), expected)


def test_an_interrupted_prompt(copied, expected):
    """Ctrl-C in the middle of a long prompt is heard at the next layer, not at the end."""
    prompt = np.random.default_rng(0).integers(0, 512, 6000).tolist()
    with moeflux.load(copied, slots=4, context=8192) as engine:
        start = time.perf_counter()
        forward(engine.model, Batch((Segment(engine.sequence(), prompt, "none"),)))  # more than an engine plans for
        whole = time.perf_counter() - start
        sequence = engine.sequence()
        before = signal.signal(signal.SIGALRM, _interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, whole / 8)
            with pytest.raises(KeyboardInterrupt):
                forward(engine.model, Batch((Segment(sequence, prompt, "none"),)))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        with pytest.raises(moeflux.StateError, match="KeyboardInterrupt"):
            engine.forward(Segment(sequence, [1]))
        np.testing.assert_array_equal(engine.score(IDS), expected)


def _interrupt(*_):
    raise KeyboardInterrupt


def test_closing_while_hints_are_read(copied):
    for _ in range(20):
        engine = moeflux.load(copied, slots=3, hints="both")
        engine.forward(Segment(engine.sequence(), [1]))
        engine.close()
        with pytest.raises(moeflux.ClosedError):
            engine.forward(Segment(engine.sequence(), [1]))


def test_a_closed_store_ends_a_run_that_waits(copied):
    """Somebody closes the engine from another thread: the run ends with an error instead of waiting forever."""
    with moeflux.load(copied, slots=2, reader="python") as engine:
        sequence = engine.sequence()
        engine.model.experts.store.close()
        with pytest.raises(moeflux.ClosedError):
            engine.forward(Segment(sequence, IDS))
