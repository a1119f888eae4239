"""Arguments that models write as XML: `<parameter=name>` and a bare text, which the tool's schema gives a type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from moeflux.text.json_value import read_value

_OPEN, _CLOSE = "<parameter=", "</parameter>"
_BOUND = re.compile("</parameter>|<parameter=|</function>")
_NAME_END = re.compile("[>\n]")
_SPACE = re.compile(r"\s*")


def read_parameters(body: str, properties: Any) -> dict[str, Any]:
    """`properties`: of the tool's schema."""
    known = properties if isinstance(properties, Mapping) else {}
    return {name: typed_value(text, known.get(name)) for name, text in find_parameters(body)}


def find_parameters(body: str) -> Iterator[tuple[str, str]]:
    """Names and texts. Nothing is looked at twice but white space behind an end, once."""
    at = 0
    while (start := body.find(_OPEN, at)) >= 0:
        name_at = start + len(_OPEN)
        ends = _NAME_END.search(body, name_at)
        if ends is None:
            return
        if ends[0] == "\n" or ends.start() == name_at:
            at = ends.start()  # no name ends before it
            continue
        begin = ends.end() + body.startswith("\n", ends.end())
        end, at = _find_end(body, begin)
        yield body[name_at : ends.start()].strip(), body[begin:end].removesuffix("\n")


def _find_end(body: str, begin: int) -> tuple[int, int]:
    """Where a text ends, and where to go on. An end tag counts only where something can follow that ends it too."""
    for bound in _BOUND.finditer(body, begin):
        if bound[0] != _CLOSE:
            return bound.start(), bound.start()
        space = _SPACE.match(body, bound.end())
        after = space.end() if space else bound.end()
        if after == len(body) or body.startswith((_OPEN, "</function>"), after):
            return bound.start(), after
    return len(body), len(body)


def typed_value(text: str, schema: Any) -> Any:
    """What a parameter written as bare text stands for: a string, unless its schema says otherwise and the text agrees."""
    kinds = schema.get("type", ()) if isinstance(schema, Mapping) else "string"
    if kinds == "string" or (isinstance(schema, Mapping) and _has_strings(schema.get("enum"))):
        return text
    word = text.strip()
    if word.lower() in ("true", "false", "null", "none"):
        word = {"none": "null"}.get(word.lower(), word.lower())
    try:
        value = read_value(word)
    except ValueError:
        return text
    strings = isinstance(kinds, (str, list, tuple)) and "string" in kinds
    return text if strings and not isinstance(value, (dict, list)) and value is not None else value


def _has_strings(enum: Any) -> bool:
    return isinstance(enum, list) and any(isinstance(item, str) for item in enum)
