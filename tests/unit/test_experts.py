"""Geometry of experts: the extents of a table hold the bytes of the expert, whatever the layout."""

from __future__ import annotations

import numpy as np
import pytest

import moeflux
from moeflux.formats.quant import decode
from moeflux.runtime.demand import Lease


@pytest.mark.parametrize(
    ("name", "layer"), [("qwen3_moe-4bit-f32", 0), ("deepseek_v3-4bit-f32", 2), ("qwen3_moe-mixed-f32", 1)]
)
def test_extents_of_stacks(mlx, name, layer):
    with moeflux.load(mlx(name)) as engine:
        checkpoint = engine._checkpoint
        table = checkpoint.experts(layer)
        assert len(table.extents(3)) == 9
        assert sum(extent.length for extent in table.extents(3)) == table.layout.nbytes
        lease = Lease(checkpoint, layer, [3])
        for part in ("gate", "up", "down"):
            stack = decode(checkpoint.load(checkpoint.tensor(f"model.layers.{layer}.mlp.switch_mlp.{part}_proj.weight")))
            np.testing.assert_array_equal(decode(lease.matrices(3)[part]), stack[3])


def test_lease_grants_only_what_was_asked(mlx):
    with moeflux.load(mlx("qwen3_moe-4bit-f32")) as engine:
        lease = engine.model.experts.acquire(0, [1])
        with pytest.raises(KeyError, match="expert 2"):
            lease.matrices(2)
        lease.release()
        with pytest.raises(KeyError, match="expert 1"):
            lease.matrices(1)
        with pytest.raises(IndexError):
            engine._checkpoint.experts(0).extents(8)
