"""Backends by name. Each is imported only when asked for, so that none is needed to use another."""

from __future__ import annotations

from moeflux.backends.ops import Ops
from moeflux.core.config import EngineConfig
from moeflux.core.errors import OptionError


def open_backend(config: EngineConfig) -> Ops:
    if config.resolved_backend == "numpy":
        from moeflux.backends.numpy.ops import NumpyOps

        return NumpyOps()
    if config.resolved_backend == "cuda":
        from moeflux.backends.cuda.device import open_device

        device = open_device()  # raises before anything of torch is needed
        from moeflux.backends.cuda.ops import CudaOps

        return CudaOps(device)
    from moeflux.backends.native.ops import NativeOps, available_isas

    if config.isa not in ("auto", *available_isas()):
        raise OptionError(
            f"this machine has no {config.isa}", where="option 'isa'", hint=f"available: {', '.join(available_isas())}"
        )
    return NativeOps(config.n_threads, config.isa)
