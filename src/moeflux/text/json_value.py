"""JSON values of models and clients: as the standard says and of a sane depth. What is not so is always a ValueError."""

from __future__ import annotations

import json
import math
from typing import Any

from moeflux.core.characters import is_unicode
from moeflux.core.json_file import nested_beyond

MOST_LEVELS = 128


def read_value(text: str) -> Any:
    """Python alone would take NaN and Infinity, which are not JSON, and fail on deep brackets in a way of its own."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"more than {MOST_LEVELS} levels") from None
    if nested_beyond([value], MOST_LEVELS + 1):
        raise ValueError(f"more than {MOST_LEVELS} levels")
    return value


def write_value(value: Any) -> str:
    """As text that is Unicode: halves of surrogate pairs stay escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(value, allow_nan=False)


def completed_members(text: str) -> dict[str, Any]:
    """Of an object that may be cut off: the members that are whole."""
    try:
        value = read_value(text)
        return value if isinstance(value, dict) else {}
    except ValueError:
        pass
    for cut in (*([text] if text.endswith(('"', "}", "]")) else []), text[: _last_comma(text)]):  # a number may go on
        try:
            value = read_value(cut + "}")
        except ValueError:
            continue
        return value if isinstance(value, dict) else {}
    return {}


def _last_comma(text: str) -> int:
    """Behind a member of the outermost object."""
    found, depth, in_string, escaped = 0, 0, False, False
    for i, character in enumerate(text):
        if in_string:
            in_string = character != '"' or escaped
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string, escaped = True, False
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
        elif character == "," and depth == 1:
            found = i
    return found


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is beyond every float")
    return number
