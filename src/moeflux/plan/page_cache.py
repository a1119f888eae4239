"""What of a file lies in the page cache, and letting it go, so that a measurement can say whether it was cold."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np

_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_mincore.restype = ctypes.c_int


def cached_share(descriptor: int, offset: int, length: int) -> float:
    """Share of the pages of a range that are in memory; all of them where the system will not tell."""
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    size = offset + length - start
    try:
        mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start)
    except (OSError, ValueError):
        return 1.0
    view = np.frombuffer(mapping, dtype=np.uint8)  # only its address is used: no page is touched
    pages = np.ones(-(-size // mmap.PAGESIZE), dtype=np.uint8)
    failed = _mincore(view.ctypes.data, size, pages.ctypes.data) != 0
    del view
    mapping.close()
    return 1.0 if failed else float((pages & 1).mean())


def forget(descriptor: int, offset: int, length: int) -> None:
    """Drop what is clean of a range from the page cache; whole pages only."""
    with contextlib.suppress(OSError):  # advice: some file systems have none to take
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
