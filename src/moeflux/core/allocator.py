"""What was freed, given back to the system: an allocator keeps it otherwise, and it counts as memory of the process."""

from __future__ import annotations

import ctypes
import gc


def release_freed() -> None:
    """Does nothing where the C library has no such call."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
