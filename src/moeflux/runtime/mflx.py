"""Import of MFLX states: which words and tables a model has there, and how they become states here.

What another program computed is close to what this one would, not equal. That program rotates the shared key of latent
attention in other pairs and with other frequencies than the model was trained with, so such states are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moeflux.backends.state import DeltaState, KvState, LayerState
from moeflux.core.errors import SnapshotError
from moeflux.formats.mflx import MflxLayer, read_mflx
from moeflux.models.spec import Attention, DeltaNet, ModelSpec
from moeflux.runtime.snapshot import Snapshot


def import_mflx(path: Path, tokens: Sequence[int], spec: ModelSpec, states: tuple[LayerState, ...]) -> Snapshot:
    """`tokens`: what the state is of, because the file does not say. `states`: empty ones, which are filled."""
    tables = read_mflx(path, _words(path, spec), _layers(spec), len(tokens))
    if not all(np.isfinite(table).all() for layer in tables for table in layer):
        raise SnapshotError("holds NaN or infinity", where=str(path))
    for state, found in zip(states, tables, strict=True):
        match state:
            case KvState(keys=keys, values=values):
                for rows, table in zip((keys, values), found, strict=True):
                    rows.append(table.reshape(-1, *rows.row_shape))
            case DeltaState(conv=conv, delta=delta):
                heads, key_dim, value_dim = delta.shape
                state.take_array(conv, found[0].reshape(conv.shape))
                state.take_array(delta, found[1].reshape(heads, value_dim, key_dim).transpose(0, 2, 1))
    return Snapshot(np.array(tokens, dtype=np.int32), states)


def _words(path: Path, spec: ModelSpec) -> tuple[int, ...]:
    mixers = [layer.mixer for layer in spec.layers]
    attention = [i for i, mixer in enumerate(mixers) if isinstance(mixer, Attention)]
    if not attention or not all(isinstance(mixer, Attention | DeltaNet) for mixer in mixers):
        raise SnapshotError(
            f"the program that wrote it computes {spec.model_type} differently from how it was trained",
            where=str(path),
            hint="run the prompt again",
        )
    first, interval = mixers[attention[0]], attention[0] + 1
    delta = next((mixer for mixer in mixers if isinstance(mixer, DeltaNet)), None)
    assert isinstance(first, Attention)
    conv_bytes = (delta.conv_width - 1) * delta.channels * 4 if delta else 0
    delta_bytes = delta.n_value_heads * delta.key_dim * delta.value_dim * 4 if delta else 0
    return (len(mixers), interval, first.n_kv_heads, first.head_dim, conv_bytes, delta_bytes, 0, 0)


def _layers(spec: ModelSpec) -> list[MflxLayer]:
    found = []
    for layer in spec.layers:
        match layer.mixer:
            case Attention(n_kv_heads=heads, head_dim=dim):
                found.append(MflxLayer((heads * dim, heads * dim), True))
            case DeltaNet() as d:
                sizes = ((d.conv_width - 1) * d.channels, d.n_value_heads * d.key_dim * d.value_dim)
                found.append(MflxLayer(sizes, False))
    return found
