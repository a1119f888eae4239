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


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is beyond every float")
    return number
