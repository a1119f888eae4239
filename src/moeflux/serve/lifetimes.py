"""How long clients of OpenAI want the state of a prompt to be kept at least: breakpoints on parts, and times like 30m."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moeflux.serve.errors import refuse

LEAST = "30m"  # where a breakpoint names no time
_TTL = re.compile(r"(\d{1,6})([smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def with_lifetimes(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message with the breakpoints on its parts as seconds."""
    content = item.get("content")
    if not isinstance(content, list):
        return dict(item)
    return {**item, "content": [_part(part, f"{where}.content.{i}") for i, part in enumerate(content)]}


def _part(part: Any, where: str) -> Any:
    mark = part.get("prompt_cache_breakpoint") if isinstance(part, Mapping) else None
    if not isinstance(mark, Mapping):
        return part
    return {**part, "keep_s": seconds_of(mark.get("ttl") or LEAST, f"{where}.prompt_cache_breakpoint.ttl")}


def seconds_of(ttl: object, where: str) -> float:
    """A time such as 30m."""
    found = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    if found is None:
        raise refuse("it is a time such as 30m or 12h", where)
    return int(found[1]) * _UNITS[found[2]]
