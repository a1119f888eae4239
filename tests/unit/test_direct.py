from __future__ import annotations

import numpy as np
import pytest

from moeflux.bench.direct import BUFFER_BYTES, DirectFile


@pytest.mark.parametrize("sizes", [[0], [1], [4096], [4095, 2], [BUFFER_BYTES], [BUFFER_BYTES - 1, 3, BUFFER_BYTES * 2 + 5]])
def test_writes_what_it_was_given(tmp_path, sizes):
    random = np.random.default_rng(0)
    blocks = [np.frombuffer(random.bytes(n), dtype=np.uint8) for n in sizes]
    with DirectFile(tmp_path / "file") as out:
        for block in blocks:
            out.write(block)
        out.write(b"end")
    assert (tmp_path / "file").read_bytes() == b"".join(block.tobytes() for block in blocks) + b"end"
