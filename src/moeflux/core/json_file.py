"""JSON objects from files that are not trusted: regular files of a sane size, UTF-8, no duplicate keys, no deep nesting."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from moeflux.core.errors import FormatError, ReadError

MAX_JSON_BYTES = 64 * 2**20
MAX_NESTING = 32


def read_json(path: Path) -> dict[str, Any]:
    try:
        check_regular(path)
        if path.stat().st_size > MAX_JSON_BYTES:
            raise FormatError(f"larger than {MAX_JSON_BYTES} bytes", where=str(path))
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise ReadError(error.strerror or str(error), where=str(path)) from error


def check_regular(path: Path) -> None:
    """A pipe would be waited for and a device read for ever. Links to files are fine: the hub's cache is made of them."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise FormatError("is not a regular file", where=str(path))


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object from a file that is not trusted: UTF-8, no duplicate keys, no deep nesting, no other top level."""
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise FormatError("JSON nested too deeply", where=where) from None
    except ValueError as error:
        raise FormatError(f"not valid JSON: {error}", where=where) from None
    if not isinstance(value, dict):
        raise FormatError(f"expected a JSON object, found {type(value).__name__}", where=where)
    if nested_beyond(value, MAX_NESTING):
        raise FormatError("JSON nested too deeply", where=where)
    return value


def nested_beyond(value: Any, levels: int) -> bool:
    """What the parser can just hold would be too deep for whoever compares or prints it."""
    level = [value]
    for _ in range(levels):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {shown(twice)} stands twice")
    return result
