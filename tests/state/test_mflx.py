"""States of the Metal program, written here as its description says, and read."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import moeflux
from conftest import DATA
from moeflux import Segment
from moeflux.backends.state import DeltaState, KvState
from moeflux.core.errors import SnapshotError
from state.families import HYBRID, LATENT, opened, text


@pytest.fixture(scope="module")
def engine():
    return moeflux.load(DATA / "mlx" / HYBRID, kv="f32")


@pytest.fixture(scope="module")
def sequence(engine):
    sequence = engine.sequence()
    engine.forward(Segment(sequence, text(20)))
    return sequence


def words(engine):
    layers = [layer.mixer for layer in engine.spec.layers]
    attention = next(i for i, mixer in enumerate(layers) if hasattr(mixer, "n_kv_heads"))
    delta = layers[0]
    conv = (delta.conv_width - 1) * delta.channels * 4
    matrix = delta.n_value_heads * delta.key_dim * delta.value_dim * 4
    return [len(layers), attention + 1, layers[attention].n_kv_heads, layers[attention].head_dim, conv, matrix]


def write(engine, sequence, version=2, magic=0x4D464C58):
    data = struct.pack("<II", magic, version) + struct.pack("<6I", *words(engine))
    data += struct.pack("<II", 0, 0) if version == 2 else b""
    for state in sequence.states:
        match state:
            case KvState():
                data += struct.pack("<i", len(state.keys)) + state.keys.filled.tobytes() + state.values.filled.tobytes()
            case DeltaState():
                data += state.conv.tobytes() + np.ascontiguousarray(state.delta.transpose(0, 2, 1)).tobytes()
    return data


@pytest.mark.parametrize("version", [1, 2])
def test_import(engine, sequence, version, tmp_path):
    (tmp_path / "state").write_bytes(write(engine, sequence, version))
    imported = engine.import_state(tmp_path / "state", text(20))
    (logits,) = engine.forward(Segment(imported, [5]))
    np.testing.assert_array_equal(logits[0], engine.score([*text(20), 5])[-1])


def test_what_does_not_fit_is_refused(engine, sequence, tmp_path):
    path, data = tmp_path / "state", write(engine, sequence)
    bad = {
        "not an MFLX": b"x" * 100,
        "version 3": write(engine, sequence, 3),
        "header": data[:20],
        "ends": data[:-1],
        "has .* bytes": data + b"\0",
        "another model: layers": data[:8] + struct.pack("<I", 99) + data[12:],
        "NaN": data[:-4] + struct.pack("<f", np.nan),
    }
    for what, content in bad.items():
        path.write_bytes(content)
        with pytest.raises(SnapshotError, match=what):
            engine.import_state(path, text(20))
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match="20 positions, but 21 tokens"):
        engine.import_state(path, text(21))


def test_negative_lengths_are_refused(engine, sequence, tmp_path):
    path, data = tmp_path / "state", write(engine, sequence)
    at = data.index(struct.pack("<i", 20) + sequence.states[words(engine)[1] - 1].keys.filled.tobytes()[:16])
    path.write_bytes(data[:at] + struct.pack("<i", -5) + data[at + 4 :])
    with pytest.raises(SnapshotError, match="-5 positions"):
        engine.import_state(path, text(20))


def test_latent_states_are_refused_with_the_reason(tmp_path):
    (tmp_path / "state").write_bytes(struct.pack("<10I", 0x4D464C58, 2, 4, 1, 4, 48, 0, 0, 32, 16))
    with pytest.raises(SnapshotError, match="computes deepseek_v3 differently"):
        opened(LATENT).import_state(tmp_path / "state", [1])
