"""Backends by name. Each is imported only when asked for, so that none is needed to use another."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from moeflux.backends.base import Backend, WeightSizes
from moeflux.core.config import EngineConfig
from moeflux.core.errors import DeviceError, MoefluxError, OptionError
from moeflux.models.spec import ModelSpec

OLDEST_GPU = (8, 0)  # compute capability, as in cuda/device.py
DRIVER = Path("/dev/nvidiactl")


def open_backend(config: EngineConfig) -> Backend:
    """The one that was asked for; the native one where that is left open. DeviceError where there is no device for it."""
    if config.resolved_backend == "numpy":
        from moeflux.backends.numpy.backend import NumpyBackend

        return NumpyBackend(config)
    if config.resolved_backend == "cuda":
        from moeflux.backends.cuda.device import open_device

        device = open_device()  # raises before anything of torch is needed
        from moeflux.backends.cuda.backend import CudaBackend

        return CudaBackend(config, device)
    from moeflux.backends.native.backend import NativeBackend

    return NativeBackend(config)


def choose_backend(config: EngineConfig) -> tuple[Backend, tuple[str, ...]]:
    """As asked; where that is left open, the GPU if one can be used, else the processor. And what there is to say about it.

    Where no GPU is in sight or wanted, nothing of torch is imported.
    """
    if config.backend != "auto":
        return open_backend(config), ()
    if config.vram_bytes == 0:
        return open_backend(config), ()
    if not gpu_in_sight():
        asked = config.vram_bytes is not None
        return open_backend(config), ("there is no GPU: option 'vram' does nothing, the processor computes",) * asked
    try:
        return open_backend(replace(config, backend="cuda")), ()
    except (DeviceError, OptionError) as error:  # an option of the processor's, like threads, chooses it
        return open_backend(config), (gpu_unused(error),)


def gpu_unused(error: MoefluxError) -> str:
    return f"the GPU is not used, the processor computes: {error.where}: {error.what}"


def gpu_refusal(spec: ModelSpec, sizes: WeightSizes) -> str | None:
    """Why a GPU would run this model slowly, or None. Needs no GPU and imports nothing of it."""
    from moeflux.backends.cuda.costs import shape_refusal

    return shape_refusal(spec, sizes)


def missing_packages() -> list[str]:
    """That a GPU needs and that are not installed. Imports none."""
    return [name for name in ("torch", "triton") if find_spec(name) is None]


def best_isa() -> str:
    """The best instruction set that there are kernels for on this processor."""
    from moeflux.backends.native.ops import available_isas

    return available_isas()[0]


def gpu_in_sight() -> bool:
    """Whether a driver is loaded. Imports nothing."""
    return DRIVER.exists()
