"""stdin, stdout and stderr as they were given to the process: closed, full, in any encoding, or a pipe that nobody reads.

stdout is data: what cannot be written ends the command with one line on stderr. stderr is talk: what cannot be written there
is lost, and the command goes on. stdin is checked to be text where it is read.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

from moeflux.core.errors import InputError, ReadError

MOST_CHARACTERS = 2**28  # of one text: more than any context holds, and an endless file comes to an end


class OutputError(Exception):
    """stdout takes no more. Not one of the library's errors: whoever goes on after those must not go on after this."""

    def __init__(self, error: OSError) -> None:
        self.nobody_reads = error.errno == errno.EPIPE
        super().__init__(f"stdout: {error.strerror or error}")


class _Data(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputError(error) from error


class _Talk(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def prepare_streams() -> None:
    """Once, before anything is read or printed. What cannot be encoded is escaped, what cannot be decoded is kept.

    A closed descriptor is filled, so that no file that is opened later takes its number.
    """
    for fd in range(3):
        if not _is_open(fd):
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    sys.stderr = _writer(_Talk(2, "w", closefd=False), sys.stderr)
    if sys.stdout is None:
        raise OutputError(OSError(errno.EBADF, "is closed"))
    sys.stdout = _writer(_Data(1, "w", closefd=False), sys.stdout)


def drop_output() -> None:
    """What is still held for stdout goes nowhere, so that the end of the process does not fail on it again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    if sys.stdout is not None:
        sys.stdout.flush()


def stdin_is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def read_stdin() -> str:
    """All of it."""
    if sys.stdin is None:
        raise InputError("is closed: there is nothing to read", where="stdin")
    try:
        text = sys.stdin.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise ReadError(error.strerror or str(error), where="stdin") from error
    check_length(text, "stdin")
    return check_text(text, "stdin")


def read_line() -> str:
    """Without its end; EOFError where there is none."""
    try:
        line = sys.stdin.readline(MOST_CHARACTERS + 1)
    except OSError as error:
        raise ReadError(error.strerror or str(error), where="stdin") from error
    if not line:
        raise EOFError
    check_length(line, "stdin")
    return line.removesuffix("\n")


def check_length(text: str | bytes, where: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"more than {MOST_CHARACTERS:,} characters, which is no text for a model", where=where)


def check_text(text: str, where: str) -> str:
    """Bytes that were no text came through as lone surrogates."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError(f"not a text in {_encoding_of(where)}", where=where)
    return text


def _encoding_of(where: str) -> str:
    encoding = sys.stdin.encoding if where == "stdin" else sys.getfilesystemencoding()
    return encoding.upper()


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _writer(raw: io.FileIO, like: TextIO | None) -> TextIO:
    encoding = like.encoding if like is not None else "utf-8"
    buffered = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffered, encoding, "backslashreplace", line_buffering=raw.isatty() or raw.fileno() == 2)
