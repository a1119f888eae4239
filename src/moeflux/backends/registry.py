"""Backends by name. Each is imported only when asked for, so that none is needed to use another."""

from __future__ import annotations

from moeflux.backends.ops import Ops


def open_backend(name: str) -> Ops:
    """`name` is one that `core.config` has accepted."""
    from moeflux.backends.numpy.ops import NumpyOps

    return {"numpy": NumpyOps}[name]()
