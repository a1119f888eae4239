"""A flag that any thread may set to end a forward between two layers."""

from __future__ import annotations


class CancelFlag:
    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    @property
    def is_set(self) -> bool:
        return self._set
