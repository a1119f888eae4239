"""The built module: no instruction set leaks into code that another machine would run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import moeflux._native as _native


def test_instruction_sets_share_no_symbols():
    """A weak symbol in an AVX-512 object could be the copy that the linker keeps for everybody."""
    root = Path(__file__).parents[2]
    objects = sorted(root.glob("build/cp*/CMakeFiles/moeflux_kernels.dir/native/isa/*.o"))
    if not objects or shutil.which("nm") is None:
        pytest.skip(f"no object files under {root / 'build'} or no nm: built elsewhere")
    for file in objects:
        symbols = subprocess.run(["nm", "--defined-only", file], capture_output=True, text=True, check=True).stdout
        kinds = {line.split()[-1]: line.split()[-2] for line in symbols.splitlines()}
        shared = [name for name, kind in kinds.items() if kind in "WVuwTDB" and "_kernelsEv" not in name]
        assert shared == [], f"{file.name}: {shared}"


def test_memory_is_zeroed_and_lives_with_its_views():
    view = _native.Block(5_000_000).bytes()[4_999_000:]
    assert (view == 0).all()
    view[:] = 7
    assert view.sum() == 7 * 1000
