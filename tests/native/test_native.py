from __future__ import annotations

from pathlib import Path

import pytest

from moeflux.backends.native.ops import available_isas


def test_instruction_set_agrees_with_the_kernel():
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        pytest.skip("no /proc/cpuinfo to compare with")
    flags = set(cpuinfo.read_text().split())
    needs = {
        "avx512_vnni": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
        "avx_vnni": {"avx2", "fma", "f16c", "avx_vnni"},
        "avx2": {"avx2", "fma", "f16c"},
        "generic": set(),
    }
    assert available_isas() == tuple(name for name, wanted in needs.items() if wanted <= flags)
