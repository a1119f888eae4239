"""Values that clients send, copied into plain data of a bounded size: what JSON can hold and nothing else.

A Python caller can pass more than JSON can say: other types, the same list a thousand times, a list inside itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from reprlib import repr as shown
from typing import Any

from moeflux.core.characters import check_characters
from moeflux.core.errors import InputError
from moeflux.text.json_value import MOST_LEVELS

MOST_VALUES = 250_000
MOST_CHARACTERS = 2**26
MOST_BITS = 1024  # of a whole number; a float's range


class PlainReader:
    """Of one request: its limits hold for all that it reads together."""

    def __init__(self) -> None:
        self.n_values = self.n_characters = 0

    def value(self, value: object, where: str, levels: int = MOST_LEVELS) -> Any:
        self._count(where)
        if isinstance(value, str):
            return self.text(value, where)
        if value is None or (isinstance(value, int) and value.bit_length() <= MOST_BITS):
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        if not isinstance(value, (Mapping, list, tuple)):
            raise InputError(f"{shown(value)} is not JSON", where=where)
        if levels == 0:
            raise InputError(f"more than {MOST_LEVELS} levels of brackets", where=where)
        if not isinstance(value, Mapping):
            return [self.value(item, where, levels - 1) for item in value]
        return {self.text(key, where): self.value(item, where, levels - 1) for key, item in value.items()}

    def text(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise InputError(f"{shown(value)} is not a text", where=where)
        self.n_characters += len(value)
        if self.n_characters > MOST_CHARACTERS:
            raise InputError(f"more than {MOST_CHARACTERS} characters in all", where=where)
        return check_characters(value, where)

    def mapping(self, value: object, where: str) -> Mapping[Any, Any]:
        """The outer shell only."""
        self._count(where)
        if not isinstance(value, Mapping):
            raise InputError(f"{shown(value)} is not an object", where=where)
        return value

    def sequence(self, value: object, where: str) -> list[Any] | tuple[Any, ...]:
        self._count(where)
        if not isinstance(value, (list, tuple)):
            raise InputError(f"{shown(value)} is not a list", where=where)
        return value

    def _count(self, where: str) -> None:
        self.n_values += 1
        if self.n_values > MOST_VALUES:
            raise InputError(f"more than {MOST_VALUES} values in all", where=where)
