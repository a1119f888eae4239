"""What the native store throws, as the errors that users know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import moeflux._native as _native
from moeflux.core.errors import BudgetError, ClosedError, FormatError, MoefluxError, ReadError

KINDS: dict[str, type[MoefluxError]] = {
    "read": ReadError,
    "format": FormatError,
    "closed": ClosedError,
    "full": BudgetError,
}


def translate(error: _native.StoreError) -> MoefluxError:
    """The same error with its type, place and hint; a failed read keeps its errno as `__cause__`."""
    kind, what, where, hint, errno = error.args
    result = KINDS[kind](what, where=where or None, hint=hint or None)
    result.__cause__ = OSError(errno, what) if errno else None
    return result


@contextmanager
def native_errors() -> Iterator[None]:
    """Around every call that can reach the native store, wherever it is made."""
    try:
        yield
    except _native.StoreError as error:
        translated = translate(error)
        raise translated from translated.__cause__
