"""Which backend is used where that is left open: the GPU if it can be, else the processor, which is said once."""

from __future__ import annotations

import pytest

import moeflux
from conftest import DATA
from moeflux.backends import registry
from moeflux.core.errors import DeviceError, OptionError

MODEL = DATA / "mlx" / "qwen3_moe-4bit-f32"


def test_no_gpu_is_nothing_to_say(monkeypatch):
    monkeypatch.setattr(registry, "gpu_in_sight", lambda: False)
    with moeflux.load(MODEL) as engine:
        assert engine.config.backend == "native"
        assert engine.notes == ()
    with moeflux.load(MODEL, vram="8GiB") as engine:
        assert engine.notes == ("there is no GPU: option 'vram' does nothing, the processor computes",)


def test_a_gpu_that_cannot_be_used_is_said_once(monkeypatch):
    def broken(config):
        if config.backend == "cuda":
            raise DeviceError("driver 1.0 is too old", where="backend 'cuda'")
        return opened(config)

    opened = registry.open_backend
    monkeypatch.setattr(registry, "gpu_in_sight", lambda: True)
    monkeypatch.setattr(registry, "open_backend", broken)
    with moeflux.load(MODEL) as engine:
        assert engine.config.backend == "native"
        assert engine.notes == ("the GPU is not used, the processor computes: backend 'cuda': driver 1.0 is too old",)
    with moeflux.load(MODEL, threads=1) as engine:  # an option of the processor's
        assert len(engine.notes) == 1
        assert "option 'threads'" in engine.notes[0]
    with moeflux.load(MODEL, vram=0) as engine:
        assert engine.notes == ()


def test_a_model_that_a_gpu_would_run_slowly_stays_on_the_processor(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(registry, "gpu_in_sight", lambda: True)
    with moeflux.load(MODEL) as engine:
        assert engine.config.backend == "native"
        assert len(engine.notes) == 1
        assert "the GPU is not used" in engine.notes[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"backend": "native", "vram": "1GiB"}, "host memory"),
        ({"backend": "numpy", "vram": 5}, "host memory"),
        ({"backend": "cuda", "threads": 2}, "on the GPU"),
        ({"backend": "cuda", "isa": "generic"}, "on the GPU"),
        ({"backend": "cuda", "ring": 1}, "one graph"),
        ({"backend": "cuda", "vram": 0}, "leaves the GPU nothing"),
        ({"backend": "auto", "vram": "much"}, "cannot read"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, reason):
    with pytest.raises(OptionError, match=reason):
        moeflux.load(MODEL, **options)
