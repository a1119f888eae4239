"""With which arithmetic a state was computed: engines use each other's states only where both give the same bits.

A numerics class names the order of additions and where results are rounded. Angles, exponentials and logarithms come
from the system's mathematics library and from numpy, which round in their own ways from version to version and from
processor to processor. So the class also carries what these give here for some arguments.
"""

from __future__ import annotations

import math
import platform
from functools import cache
from hashlib import blake2b

import numpy as np

NUMERICS_VERSION = 1  # to be raised by every change after which any backend gives other bits


@cache
def library_mark() -> str:
    """Of the functions outside this package that all backends use, on this machine."""
    angles = [math.ldexp(1 + 0.37 * i, i % 24 - 6) for i in range(256)]
    values = [f(angle) for angle in angles for f in (math.cos, math.sin)]
    values += [f(-i / 7) for i in range(256) for f in (math.exp, math.expm1)]
    powers = 1e7 ** (-np.arange(0, 256, 2) / 256)
    digest = blake2b(np.array(values).tobytes() + powers.tobytes(), digest_size=4).hexdigest()
    return f"{'-'.join(platform.libc_ver()).strip('-') or 'libc'}-{digest}"


@cache
def numpy_mark() -> str:
    """Of numpy's products and functions: its libraries choose other kernels for other processors."""
    digest = blake2b(digest_size=4)
    rng = np.random.default_rng(0)
    for n in (1, 7, 64, 300):
        a, b = rng.standard_normal((2, 16, n), dtype=np.float32)
        for values in (a @ b.T, np.exp(-a * a), np.cos(100 * a.astype(np.float64)), np.sum(a * b, axis=-1)):
            digest.update(values.tobytes())
    return f"{np.__version__}-{digest.hexdigest()}"
