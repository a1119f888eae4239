from __future__ import annotations

from pathlib import Path

import pytest

from moeflux.backends.native.ops import available_isas


def test_instruction_set_agrees_with_the_kernel():
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        pytest.skip("no /proc/cpuinfo to compare with")
    flags = set(cpuinfo.read_text().split())
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"} <= flags:
        expected = "avx512_vnni"
    elif {"avx2", "fma", "f16c"} <= flags:
        expected = "avx2"
    else:
        expected = "generic"
    assert available_isas()[0] == expected
