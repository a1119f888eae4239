"""Measured forwards: which bytes had to move, and what the tokens' routing was like."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moeflux.bench.routing import TokenStream, overlap
from moeflux.bench.speed import bench_decode
from moeflux.bench.synthetic import TOPIC_TOKENS, write_checkpoint
from moeflux.bench.watch import Watch
from moeflux.core.config import EngineConfig
from moeflux.core.errors import OptionError
from moeflux.runtime.batch import Segment
from moeflux.runtime.engine import Engine
from unit.test_synthetic import QUANT, QWEN

WIDE = QWEN | QUANT | {"vocab_size": 4096, "num_experts": 64, "num_experts_per_tok": 4, "hidden_size": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watch") / "model"
    write_checkpoint(WIDE, folder)
    return folder


def in_memory(engine) -> set[tuple[int, int]]:
    return {(layer, expert) for layer, expert, _, state in engine.model.experts.store.native.slots() if state == "ready"}


@pytest.mark.parametrize("scales", ["kept", "streamed"])
@pytest.mark.parametrize("hints", ["none", "both"])
def test_missing_is_what_was_not_in_memory_when_the_token_began(model, hints, scales):
    with Engine(EngineConfig(model, threads=1, slots=96, hints=hints, scales=scales)) as engine:
        recorder = engine.record_routing()
        watch, sequence = Watch(engine, recorder), engine.sequence()
        missing = needed = 0
        for tokens in ([5, 6, 7, 8, 9, 10, 11, 12, 13, 14], *([token] for token in TokenStream("uniform", 4096).take(30))):
            before = in_memory(engine)
            watch.forward(Segment(sequence, tokens))
            wanted = {(layer, int(e)) for row in recorder.last_step() for layer, ids in enumerate(row) for e in ids}
            needed += len(wanted)
            missing += len(wanted - before)
        expert, read = engine.model.experts.expert_bytes[0], engine.model.experts.read_bytes[0]
        lap, nothing = watch.lap(), watch.lap()
    assert (lap.needed_bytes, lap.missing_bytes) == (needed * expert, missing * read)
    assert (read < expert) == (scales == "kept")
    assert lap.stats.bytes_read >= lap.missing_bytes > 0
    assert (lap.forwards, lap.tokens) == (31, 40)
    assert lap.seconds >= lap.native_seconds > 0
    assert nothing.tokens == nothing.seconds == nothing.missing_bytes == 0


def test_everything_in_memory_misses_nothing(model):
    with Engine(EngineConfig(model, threads=1)) as engine:
        row = bench_decode(engine, tokens=3, context=4, repeats=2, routing="local")
    assert row.streaming is None
    assert row.overlap is not None


def test_local_tokens_share_experts_with_the_token_before(model):
    """As a share of all, measured on the model: by chance it is k / n_experts."""
    found = {}
    for routing in ("uniform", "local"):
        with Engine(EngineConfig(model, threads=1, slots=64)) as engine:
            found[routing] = bench_decode(engine, tokens=60, context=8, repeats=2, routing=routing).overlap
    assert found["uniform"] == pytest.approx(4 / 64, abs=0.05)
    assert 0.3 < found["local"] < 0.6


def test_token_streams_repeat_and_stay_in_range():
    for kind in ("uniform", "local"):
        one, other = TokenStream(kind, 1000), TokenStream(kind, 1000)
        tokens = one.take(3000)
        assert tokens == other.take(1000) + other.take(2000)
        assert set(tokens) <= set(range(1000))
    topics = np.array(tokens) // TOPIC_TOKENS
    assert 0.92 < (topics[1:] == topics[:-1]).mean() < 0.98
    assert len(set(topics)) > 10
    with pytest.raises(OptionError, match="neither"):
        TokenStream("neither", 10)


def test_overlap_counts_experts_of_the_same_layer():
    earlier, later = np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), np.array([[4, 9, 2, 10], [1, 2, 3, 4]])
    assert overlap(earlier, later) == 2 / 8
    assert overlap(later, later) == 1


def test_a_router_is_asked_before_its_mixer(tmp_path):
    """With mixers that add nothing, it sees then exactly what it will see: every guess is right."""
    folder = tmp_path / "model"
    write_checkpoint(WIDE, folder)
    silence_mixers(folder)
    with Engine(EngineConfig(folder, threads=1, slots=96)) as engine:
        sequence, stream = engine.sequence(), engine.model.runner.stream
        for token in TokenStream("uniform", 4096).take(20):
            engine.forward(Segment(sequence, [token]))
        n_layers = len(engine.spec.moe_layers())
        assert stream.foreseen == stream.asked == 20 * 4 * n_layers


@pytest.mark.parametrize(("hints", "begins_reads"), [("none", False), ("previous", True)])
def test_experts_of_the_previous_token_are_hinted(model, hints, begins_reads):
    """Below one token's working set they are gone when the layer's turn comes again."""
    with Engine(EngineConfig(model, threads=1, slots=9, hints=hints)) as engine:
        assert engine.plan.n_slots < 4 * len(engine.spec.moe_layers())
        for token in [7] * 10:
            engine.forward(Segment(engine.sequence(), [token]))  # the same experts each time
        stats = engine.stats()
    assert (stats.hints_issued > 0, stats.hints_useful > 0) == (begins_reads, begins_reads)


def silence_mixers(folder) -> None:
    """Zero scales and biases of what mixers put out."""
    (path,) = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    for name, tensor in json.loads(data[8 : 8 + length]).items():
        if name.endswith(("o_proj.scales", "o_proj.biases", "out_proj.scales", "out_proj.biases")):
            begin, end = (8 + length + offset for offset in tensor["data_offsets"])
            data[begin:end] = bytes(end - begin)
    path.write_bytes(data)
