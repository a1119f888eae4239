"""The native CPU backend's door to the compiled module."""

from __future__ import annotations

import moeflux._native as _native


def instruction_set() -> str:
    """The best instruction set of this machine that native kernels are written for."""
    return str(_native.instruction_set())
