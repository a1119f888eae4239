"""Every family through the CUDA backend, layer by layer against numpy; bits alone, in company and however a text is cut."""

from __future__ import annotations

import numpy as np
import pytest

import moeflux
from conftest import DATA
from moeflux import Segment, Trace, load
from moeflux.backends.cuda.device import open_device
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.ops import Span
from moeflux.runtime.sequence import Sequence

FAMILIES = [
    "qwen3_moe-4bit-f32",
    "qwen3_moe-mixed-f32",
    "qwen3_next-4bit-f32",
    "qwen3_5_moe_vl_fused-4bit-f32",
    "deepseek_v3-4bit-f32",
    "deepseek_v3-oldkv-4bit-f32",
]
ON_GPU = open_device().name != "cpu"
N = 80 if ON_GPU else 3
IDS = np.random.default_rng(3).integers(0, 512, N).tolist()
TOLERANCE = 2e-4  # part of a layer's own contribution, in the root mean square: activations have 16 bits per group


def opened(name, kv="f32"):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moeflux.backends.cuda.backend.CudaOps", lambda device: CudaOps(device, poison=True))
        return load(DATA / "mlx" / name, backend="cuda", kv=kv)


@pytest.mark.parametrize("name", FAMILIES if ON_GPU else FAMILIES[1:5])
def test_each_layer_is_close_to_numpy(name):
    """From the reference's own hidden states, with its routing forced: no flip can hide or amplify."""
    trace = Trace()
    load(DATA / "mlx" / name, backend="numpy", kv="f32").score(IDS, trace=trace)
    engine = opened(name)
    model = engine.model
    for index in range(len(engine.spec.layers)):
        x = trace[index, "input"]
        span = Span(0, N, 0, Sequence(engine.spec, model.ops, "f32").states[index])
        routing = None
        if (index, "router_ids") in trace:
            routing = (trace[index, "router_ids"], trace[index, "router_weights"])
        ours = model.ops.to_numpy(model.runner.layer(index, model.ops._tensor(x), [span], routing=routing)) - x
        expected = trace[index, "output"] - x
        error = np.sqrt(np.mean((ours - expected) ** 2) / np.mean(expected**2))
        assert error <= TOLERANCE, f"layer {index}: {error:.1e}"


@pytest.mark.parametrize("name", FAMILIES if ON_GPU else ["qwen3_next-4bit-f32"])
def test_bits_do_not_depend_on_cuts_or_company(name):
    engine = opened(name, "bf16")
    whole = engine.score(IDS)
    sequence, other = engine.sequence(), engine.sequence()
    cut = max(1, N // 2)
    first, _ = engine.forward(Segment(sequence, IDS[:1], "all"), Segment(other, IDS[1:3], "all"))
    rows = [first]
    if cut > 1:
        rows += engine.forward(Segment(sequence, IDS[1:cut], "all"))
    rows += [engine.forward(Segment(sequence, [token]))[0] for token in IDS[cut:]]
    np.testing.assert_array_equal(np.concatenate(rows), whole)


def test_states_copy_out_and_in():
    engine = opened("qwen3_next-4bit-f32", "bf16")
    sequence = engine.sequence()
    engine.forward(Segment(sequence, IDS[:2]))
    twin = engine.sequence()
    for mine, theirs in zip(twin.states, sequence.states, strict=True):
        out = {part.name: b"".join(np.asarray(piece).tobytes() for piece in part.parts) for part in theirs.copy_out()}

        def read_into(name, arrays, out=out):
            at = 0
            for array in arrays:
                array.reshape(-1).view(np.uint8)[:] = np.frombuffer(out[name], np.uint8)[at : at + array.nbytes]
                at += array.nbytes
            assert at == len(out[name])

        mine.copy_in(len(sequence), read_into)
    twin.tokens = list(sequence.tokens)
    kept = sequence.snapshot()
    (expected,) = engine.forward(Segment(sequence, IDS[2:3]))
    np.testing.assert_array_equal(engine.forward(Segment(twin, IDS[2:3]))[0], expected)
    sequence.adopt(kept)
    np.testing.assert_array_equal(engine.forward(Segment(sequence, IDS[2:3]))[0], expected)


def test_the_cpu_never_imports_torch():
    import subprocess
    import sys

    folder = str(DATA / "mlx" / FAMILIES[0])
    code = f"import sys, moeflux; moeflux.load({folder!r}, backend='native').close(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_gpu_is_a_typed_error(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(moeflux.core.errors.DeviceError, match=r"GPU|CUDA"):
        open_device()


def test_a_missing_package_is_a_typed_error(monkeypatch):
    monkeypatch.setattr("moeflux.backends.cuda.device.find_spec", lambda name: None)
    with pytest.raises(moeflux.core.errors.DeviceError, match="not installed"):
        open_device()
