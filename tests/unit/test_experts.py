"""Geometry of experts: the extents of a table hold the bytes of the expert, whatever the layout."""

from __future__ import annotations

import numpy as np
import pytest

import moeflux
from moeflux.formats.quant import decode
from moeflux.store.store import ExpertStore, StoreOptions


@pytest.mark.parametrize(
    ("name", "layer"), [("qwen3_moe-4bit-f32", 0), ("deepseek_v3-4bit-f32", 2), ("qwen3_moe-mixed-f32", 1)]
)
def test_extents_of_stacks(mlx, name, layer):
    with moeflux.load(mlx(name)) as engine:
        checkpoint = engine._checkpoint
        table = checkpoint.experts(layer)
        assert len(table.extents(3)) == 9
        assert sum(extent.length for extent in table.extents(3)) == table.layout.nbytes
        store = ExpertStore(checkpoint, [layer], StoreOptions(1, 1))
        lease = store.acquire(layer, [3])
        lease.wait()
        matrices = lease.matrices(3)
        for part in ("gate", "up", "down"):
            stack = decode(checkpoint.load(checkpoint.tensor(f"model.layers.{layer}.mlp.switch_mlp.{part}_proj.weight")))
            np.testing.assert_array_equal(decode(matrices[part]), stack[3])
        store.close()


def test_leases_end(mlx):
    with moeflux.load(mlx("qwen3_moe-4bit-f32"), backend="numpy") as engine:
        with engine.model.experts.acquire(0, np.array([[1, 5]])) as lease:
            assert sorted(expert for _, experts in lease.arrivals() for expert in experts) == [1, 5]
        with pytest.raises(moeflux.StateError, match="released"):
            list(lease.arrivals())
        with pytest.raises(IndexError):
            engine._checkpoint.experts(0).extents(8)
