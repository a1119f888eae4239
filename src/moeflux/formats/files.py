"""The open files of a checkpoint. Bytes are read here, never mapped; nothing is ever written.

A mapped page would count as memory of this process for as long as it is there, and would end the process if the file
became shorter.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moeflux.core.errors import ClosedError, ReadError

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Extent:
    """Where bytes are: a file of the checkpoint (by index), an offset, a length."""

    file: int
    offset: int
    length: int


class FileSet:
    """Owns one descriptor per file."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = tuple(paths)
        self._descriptors: list[int] = []
        try:
            for path in paths:
                self._descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self.close()
            raise ReadError(str(error), where=str(path)) from error

    def read(self, extent: Extent, into: Bytes) -> None:
        """Fill `into` with the extent's bytes. A file that became shorter is an error, never a crash."""
        self._check_open()
        where, view, done = str(self.paths[extent.file]), memoryview(into.data), 0
        while done < extent.length:
            try:
                n = os.preadv(self._descriptors[extent.file], [view[done : extent.length]], extent.offset + done)
            except OSError as error:
                raise ReadError(error.strerror or str(error), where=where) from error
            if n == 0:
                raise ReadError(
                    f"only {done} of the {extent.length} bytes at {extent.offset} are left",
                    where=where,
                    hint="it was shortened while open; download it again",
                )
            done += n

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _check_open(self) -> None:
        if not self._descriptors:
            raise ClosedError("the checkpoint is closed")
