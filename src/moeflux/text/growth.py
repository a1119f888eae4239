"""How many bytes an operation of a template will make, said before it is done.

Operators and methods that are not here cannot make more than they are given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from sys import getsizeof
from typing import Any

from moeflux.text.meter import ITEM_BYTES, MOST_BITS, TemplateLimit, meter

MOST_WIDTH = 9999  # of a field in a format
_SPEC = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?")
_NUMBERS = re.compile(r"\d{5,}")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

Given = Sequence[Any]
Named = Mapping[str, Any]


def of_operator(operator: str, left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _of_numbers(operator, left, right)
    if operator == "*":  # a slot of a list has eight bytes, a character up to four
        for text, times in ((left, right), (right, left)):
            if isinstance(text, (str, list, tuple)) and isinstance(times, int):
                return 8 * len(text) * max(0, times)
    if operator == "%" and isinstance(left, str):
        return of_percent(left, right)
    escaped = 6 if hasattr(left, "__html__") or hasattr(right, "__html__") else 1  # markup escapes what it meets
    return escaped * (getsizeof(left, 0) + getsizeof(right, 0))


def _of_numbers(operator: str, left: int, right: int) -> int:
    a, b = left.bit_length(), right.bit_length()
    bits = {"+": max(a, b) + 1, "*": a + b, "**": a * max(1, right)}.get(operator, a)
    if bits > MOST_BITS:
        raise TemplateLimit(f"a number of more than {MOST_BITS} bits")
    return 0


def of_percent(form: str, values: Any) -> int:
    """`form % values`."""
    specs = _SPEC.findall(form)
    if any("*" in spec for spec in specs):
        raise TemplateLimit("a width that is given with the values")
    check_widths("".join(f"{width} {digits} " for width, digits in specs))
    _, n_bytes, _ = meter().weigh(values)
    return getsizeof(form) + len(specs) * (MOST_WIDTH + 4 * n_bytes)


def check_widths(spec: str) -> None:
    if _NUMBERS.search(spec):
        raise TemplateLimit(f"a field wider than {MOST_WIDTH}")


def of_text(text: str, name: str, args: Given, named: Named) -> int | None:
    """Of a method of a text; None where templates may not call it."""
    if name in _LOOKING:
        meter().look(len(text))
        return 0
    rule = _TEXT.get(name)
    return None if rule is None else rule(text, args, named)


def _same(text: str, args: Given, named: Named) -> int:
    return getsizeof(text) * (1 if text.isascii() else 3)  # some characters have capitals of three


def _split(text: str, args: Given, named: Named) -> int:
    by = _argument(args, named, 0, "sep", None)
    most = _argument(args, named, 1, "maxsplit", -1)
    n = text.count(by) if isinstance(by, str) and by else len(text) // 2
    n = min(n, most) if isinstance(most, int) and most >= 0 else n
    return getsizeof(text) + ITEM_BYTES * (n + 1)


def _lines(text: str, args: Given, named: Named) -> int:
    return getsizeof(text) + ITEM_BYTES * (1 + sum(text.count(end) for end in _LINE_ENDS))


def _replaced(text: str, args: Given, named: Named) -> int:
    old, new = _argument(args, named, 0, "old", ""), _argument(args, named, 1, "new", "")
    most = _argument(args, named, 2, "count", -1)
    n = text.count(old) if isinstance(old, str) else 0
    n = min(n, most) if isinstance(most, int) and most >= 0 else n
    return getsizeof(text) + n * 4 * len(new) if isinstance(new, str) else 0


def _padded(text: str, args: Given, named: Named) -> int:
    width = _argument(args, named, 0, "width", 80)
    return 4 * max(len(text), width) if isinstance(width, int) else 0


def _tabs(text: str, args: Given, named: Named) -> int:
    width = _argument(args, named, 0, "tabsize", 8)
    return getsizeof(text) + 4 * text.count("\t") * max(0, width) if isinstance(width, int) else 0


def _joined(text: str, args: Given, named: Named) -> int:
    items = args[0] if args else ()
    if isinstance(items, str):
        return 4 * len(items) * (len(text) + 1)
    n_values, n_bytes, _ = meter().weigh(items)
    return n_bytes + n_values * 4 * len(text)


def _argument(args: Given, named: Named, at: int, name: str, default: Any) -> Any:
    return args[at] if at < len(args) else named.get(name, default)


def of_indent(text: Any, args: Given, named: Named) -> int:
    width = _argument(args, named, 0, "width", 4)
    width = len(width) if isinstance(width, str) else width
    lines = _lines(text, (), {}) // ITEM_BYTES if isinstance(text, str) else 0
    return getsizeof(text) + 4 * lines * max(0, width) if isinstance(width, int) else 0


Rule = Callable[[Any, Given, Named], int]
_SAME = "strip lstrip rstrip removeprefix removesuffix upper lower title capitalize swapcase casefold partition rpartition"
_TEXT: Mapping[str, Rule] = {
    **dict.fromkeys(_SAME.split(), _same),
    **dict.fromkeys(("split", "rsplit"), _split),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    "splitlines": _lines,
    "replace": _replaced,
    "expandtabs": _tabs,
    "join": _joined,
}
_IS = "alnum alpha ascii decimal digit identifier lower numeric printable space title upper"
_FINDING = ("startswith", "endswith", "find", "rfind", "index", "rindex", "count")
_LOOKING = frozenset((*_FINDING, *(f"is{kind}" for kind in _IS.split(" "))))
FILTERS: Mapping[str, Rule] = {
    "center": _padded,
    "replace": _replaced,
    "indent": of_indent,
    "format": lambda form, args, named: of_percent(str(form), named or list(args)),
    "join": lambda items, args, named: _joined(str(_argument(args, named, 0, "d", "")), [items], {}),
    "list": lambda items, args, named: ITEM_BYTES * len(items) if isinstance(items, (str, list, tuple, Mapping)) else 0,
}
