"""How deep a grammar can lead the engine that compiles it: it recurses along references, and its stack is the process's.

The bound is on the safe side: all that is named could stand in one chain.
"""

from __future__ import annotations

import json
import re
from typing import Any

from moeflux.core.errors import InputError

MOST_CHARACTERS = 2**20
MOST_LEVELS = 2000  # half of what was seen to end a thread with 8 MiB of stack
MOST_RULES = 1000  # of a Lark grammar, groups included
_RULE = re.compile(r"^\s*[?!]*[A-Za-z_][^:|\"/\n]*:|[(\[{]|ref\"\s*:", re.MULTILINE)


def check_levels(kind: str, text: str) -> None:
    where = "option 'grammar'"
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"{len(text)} characters, the limit is {MOST_CHARACTERS}", where=where)
    if kind == "lark" and (n := len(_RULE.findall(text))) > MOST_RULES:
        raise InputError(f"{n} rules and groups, the limit is {MOST_RULES}", where=where, hint="use fewer rules")
    if kind == "schema" and (n := _levels(text)) > MOST_LEVELS:
        hint = "refer to fewer definitions, or nest them less"
        raise InputError(f"its references could lead {n} levels deep, the limit is {MOST_LEVELS}", where=where, hint=hint)


def _levels(text: str) -> int:
    """Of the schema and everything that it refers to, each once."""
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):
        return 0  # whoever compiles it says what is wrong
    levels = [[root]]
    while inner := [child for node in levels[-1] for child in _children(node)]:
        levels.append(inner)
    depths: dict[int, int] = {}  # by id: what was parsed is a tree
    for node in (node for level in reversed(levels) for node in level):
        depths[id(node)] = 1 + max((depths[id(child)] for child in _children(node)), default=0)
    found = (node.get("$ref") for level in levels for node in level if isinstance(node, dict))
    targets = (_target(root, ref) for ref in {ref for ref in found if isinstance(ref, str)})
    return len(levels) + sum(depths.get(id(target), 0) for target in targets)


def _children(node: Any) -> list[Any]:
    """Those that can have children themselves."""
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [child for child in inner if isinstance(child, (dict, list))]


def _target(root: Any, ref: str) -> Any:
    """What a pointer like #/$defs/name points to; None where it is of another kind."""
    node = root
    for step in ref.removeprefix("#").strip("/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(name)] if name.isdecimal() and len(name) < 9 and int(name) < len(node) else None
        elif name:
            node = node.get(name) if isinstance(node, dict) else None
    return node
