"""A flag that ends a run: any thread may set it, native code looks at it without Python."""

from __future__ import annotations

import moeflux._native as _native
from moeflux.core.errors import CancelledError


class CancelFlag:
    """Given to `Engine.forward`; heard between layers, between parts of a layer and while experts are waited for.

    The forward then ends with CancelledError, and its sequences must be restored, as after any failure. The flag stays
    set until it is cleared.
    """

    __slots__ = ("native",)

    def __init__(self) -> None:
        self.native = _native.CancelFlag()

    def set(self) -> None:
        self.native.set()

    def clear(self) -> None:
        self.native.clear()

    @property
    def is_set(self) -> bool:
        return self.native.is_set

    def __call__(self) -> bool:
        """So that it can be given wherever a function is asked whether to stop."""
        return self.native.is_set

    def check(self) -> None:
        """Raises CancelledError where it is set."""
        if self.native.is_set:
            raise CancelledError("the run was cancelled")
