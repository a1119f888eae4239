"""Engines on a machine of one's choice: threads, instruction set, exact or integer activations, poisoned memory."""

from __future__ import annotations

from pathlib import Path

import pytest

import moeflux
from moeflux.backends.native.backend import NativeBackend
from moeflux.backends.native.ops import NativeOps


def on_machine(folder: Path, ops: NativeOps, kv: str = "bf16") -> moeflux.Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeBackend, "ops", ops)
        return moeflux.load(folder, backend="native", kv=kv)
