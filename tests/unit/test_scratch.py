"""Scratch as a plan counts it, beside what the machine really asked for."""

from __future__ import annotations

import pytest

import moeflux
from moeflux import Segment
from moeflux.backends.native.scratch import machine_bytes, scratch_bytes
from moeflux.bench.synthetic import write_checkpoint
from moeflux.plan.inspect import inspect_model
from moeflux.runtime.batch import Batch
from moeflux.runtime.forward import forward
from unit.test_synthetic import DEEPSEEK, NEXT, QUANT, QWEN, QWEN3

DENSE = DEEPSEEK | {"intermediate_size": 4096}  # its first layer is a dense one, which then needs most
GATES = {"model.layers.0.mlp.shared_expert_gate": {"group_size": 64, "bits": 8}}
CASES = {
    "qwen3_5": QWEN | QUANT,
    "qwen3_next": NEXT | QUANT,
    "qwen3": QWEN3 | QUANT,
    "deepseek": DEEPSEEK | QUANT,
    "dense": DENSE | QUANT,
    "floats": QWEN3,
    "8-bit gates": QWEN | {"quantization": QUANT["quantization"] | GATES},
}  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 7, 300, 1500])
@pytest.mark.parametrize("name", CASES)
def test_the_machine_asks_for_no_more(name, tokens, tmp_path):
    write_checkpoint(CASES[name], tmp_path / "model")
    with moeflux.load(tmp_path / "model", threads=2) as engine:
        batch = Batch((Segment(engine.sequence(), [i % 300 for i in range(tokens)], "none"),))
        forward(engine.model, batch)  # an engine refuses more tokens than were planned
        used = engine.model.ops.scratch_bytes
        integer = inspect_model(tmp_path / "model").sizes.integer
        assert integer == (name != "floats")
        counted = sum(machine_bytes(engine.spec, tokens, 2, integer).values())
        assert used <= counted <= 1.3 * used
        assert scratch_bytes(engine.spec, tokens, 2, integer) >= counted
