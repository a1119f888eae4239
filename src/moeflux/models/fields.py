"""Typed reading of config.json. Aliases must agree; a value that would change the math unnoticed is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import repr as shown
from typing import Any

from moeflux.core.errors import ConfigError

_REQUIRED: Any = object()

MAX_NUMBER = 1e15  # far above any real setting, and far below where float arithmetic with it overflows


class Fields:
    """One object of the config. `null` counts as absent, as in the hub's own files."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def where(self, name: str) -> str:
        return f"config.json: {self._path}{name}"

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def nested(self, name: str) -> Fields:
        value = self._values.get(name)
        if value is None:
            return Fields({}, f"{self._path}{name}.")
        if not isinstance(value, Mapping):
            raise ConfigError(f"expected an object, found {shown(value)}", where=self.where(name))
        return Fields(value, f"{self._path}{name}.")

    def whole(self, *names: str, default: Any = _REQUIRED, low: int = 1, high: int = 2**24) -> int:
        name, value = self._get(names, default)
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(f"expected a whole number from {low} to {high}, found {shown(value)}", where=self.where(name))
        return value

    def number(self, *names: str, default: Any = _REQUIRED, low: float = 0.0) -> float:
        name, value = self._get(names, default)
        if type(value) not in (int, float) or not low <= value <= MAX_NUMBER:
            raise ConfigError(f"expected a number from {low} to {MAX_NUMBER}, found {shown(value)}", where=self.where(name))
        return float(value)

    def flag(self, *names: str, default: Any = _REQUIRED) -> bool:
        name, value = self._get(names, default)
        if type(value) is not bool:
            raise ConfigError(f"expected true or false, found {shown(value)}", where=self.where(name))
        return value

    def only(self, name: str, *allowed: Any) -> Any:
        """The field, which must be absent (the first allowed value is then meant) or one of these."""
        value = self._values.get(name)
        if value is None:
            return allowed[0]
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise ConfigError(
                f"{shown(value)} is not supported and would change the results",
                where=self.where(name),
                hint=f"supported: {', '.join(repr(a) for a in allowed)}",
            )
        return value

    def ints(self, name: str, *, high: int) -> tuple[int, ...]:
        """A list of whole numbers below `high`; absent is empty. A single number is a list of one."""
        value = self._values.get(name)
        items: Sequence[Any] = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item < high for item in items):
            raise ConfigError(f"expected whole numbers below {high}, found {shown(value)}", where=self.where(name))
        return tuple(items)

    def words(self, name: str, *, length: int, allowed: Sequence[str]) -> tuple[str, ...] | None:
        """A list of `length` words out of `allowed`, or None where absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            raise ConfigError(f"expected a list of {length} entries, found {shown(value)}", where=self.where(name))
        for item in value:
            if item not in allowed:
                raise ConfigError(
                    f"{shown(item)} is not supported", where=self.where(name), hint=f"supported: {', '.join(allowed)}"
                )
        return tuple(value)

    def _get(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        found = [(name, self._values[name]) for name in names if self.has(name)]
        if not found:
            if default is _REQUIRED:
                raise ConfigError("the field is missing", where=self.where(" or ".join(names)))
            return names[0], default
        for name, value in found[1:]:
            if value != found[0][1]:
                raise ConfigError(f"{shown(value)} contradicts {found[0][0]} = {shown(found[0][1])}", where=self.where(name))
        return found[0]
