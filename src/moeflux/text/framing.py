"""How a template writes calls and ends thoughts, found by rendering some and looking: so that what a grammar forces is what
the next prompt will say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moeflux.core.errors import MoefluxError
from moeflux.text.json_value import write_value
from moeflux.text.messages import Arguments
from moeflux.text.regions import Syntax

Render = Callable[[Sequence[dict[str, Any]]], str]

_NAMES = ("probed_one", "probed_two")
_KEYS, _VALUES = ("probed_key", "probed_other"), ("probed_value", "probed_last")
_ONE = Arguments({_KEYS[0]: _VALUES[0]}, f'{{"{_KEYS[0]}": "{_VALUES[0]}"}}')
_TWO = Arguments(dict(zip(_KEYS, _VALUES, strict=True)), f'{{"{_KEYS[0]}": "{_VALUES[0]}", "{_KEYS[1]}": "{_VALUES[1]}"}}')
_NONE = Arguments({}, "{}")
_THOUGHT, _SAID = "probed thought", "probed answer"


@dataclass(frozen=True)
class XmlFrame:
    """Around parameters: `open` name `middle` text `close`."""

    open: str
    middle: str
    close: str


@dataclass(frozen=True)
class CallFrame:
    """`begin` name `middle` arguments `end`; with several, `between` stands between arguments and the next name."""

    begin: str
    middle: str
    between: str
    end: str
    xml: XmlFrame | None = None  # None: arguments are JSON

    def write(self, calls: Sequence[tuple[str, Arguments]]) -> str:
        """Calls as the model would write them."""
        bodies = [f"{name}{self.middle.replace(':0', f':{i}')}{self._inner(given)}" for i, (name, given) in enumerate(calls)]
        return self.begin + self.between.join(bodies) + self.end

    def _inner(self, given: Arguments) -> str:
        if (x := self.xml) is None:
            return str(given)
        texts = ((key, value if isinstance(value, str) else write_value(value)) for key, value in given.items())
        return "".join(f"{x.open}{key}{x.middle}{text}{x.close}" for key, text in texts)


def plain_frame(syntax: Syntax) -> CallFrame:
    """Where a template does not show calls: as most models learnt them."""
    call, call_end = syntax.markers["call"], syntax.markers["call_end"]
    if syntax.style == "tagged":
        begin, end = f'{call}\n{{"name": "', f"}}\n{call_end}"
        return CallFrame(begin, '", "arguments": ', f"{end}\n{begin}", end)
    section, section_end, separator = (syntax.markers[role] for role in ("section", "section_end", "separator"))
    if syntax.style == "kimi":
        middle = f":0{separator}"
        return CallFrame(f"{section}{call}functions.", middle, f"{call_end}{call}functions.", f"{call_end}{section_end}")
    begin, end = f"{call}function{separator}", f"\n```{call_end}"
    return CallFrame(section + begin, "\n```json\n", f"{end}\n{begin}", end + section_end)


def find_call_frame(syntax: Syntax, render: Render) -> CallFrame | None:
    """None: the model has no way to call."""
    if "call" not in syntax.markers:
        return None
    try:
        return _seen_frame(syntax, render) or plain_frame(syntax)
    except MoefluxError:
        return plain_frame(syntax)


def find_thought_end(syntax: Syntax, render: Render) -> str | None:
    """What stands between a thought and what is said; None: the model has no thoughts."""
    answer = syntax.markers.get("answer")
    if answer is None:
        return None
    said = {"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    try:
        text = render([{"role": "user", "content": "?"}, said])
    except MoefluxError:
        text = ""
    between = _between(text, _THOUGHT, _SAID)
    return between if between is not None and answer in between else f"\n{answer}\n\n"


def _seen_frame(syntax: Syntax, render: Render) -> CallFrame | None:
    start = syntax.markers.get("section", syntax.markers["call"])
    stop = syntax.markers.get("section_end", syntax.markers["call_end"])

    def shown(*calls: tuple[str, Arguments]) -> str:
        made = [_call(syntax, i, *call) for i, call in enumerate(calls)]
        asked: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
        text = render([*asked, {"role": "assistant", "content": "", "tool_calls": made}])
        before, found, rest = text.rpartition(_NAMES[0])[0], _NAMES[0], text.rpartition(_NAMES[0])[2]
        at = before.rfind(start)
        end = rest.rfind(stop)
        return "" if at < 0 or end < 0 else before[at:] + found + rest[: end + len(stop)]

    whole = shown((_NAMES[0], _ONE), (_NAMES[1], _ONE))
    begin, _, rest = whole.partition(_NAMES[0])
    if str(_ONE) in rest:
        middle, _, rest = rest.partition(str(_ONE))
        between, _, rest = rest.partition(_NAMES[1])
        if not rest.startswith(middle.replace(":0", ":1") if syntax.style == "kimi" else middle):
            return None
        return CallFrame(begin, middle, between, rest.partition(str(_ONE))[2])
    if syntax.style != "tagged":
        return None
    return _xml_frame(begin, shown((_NAMES[0], _NONE)), shown((_NAMES[0], _TWO)), whole)


def _xml_frame(begin: str, none: str, two: str, twice: str) -> CallFrame | None:
    """From a call without parameters, one with two, and two calls with one each."""
    middle, inner = _between(two, _NAMES[0], _KEYS[0]), _between(two, _KEYS[0], _VALUES[0])
    between, last = _between(two, _VALUES[0], _KEYS[1]), two.rpartition(_VALUES[1])[2]
    bare = none.partition(_NAMES[0])[2]
    if not middle or not inner or not between or not bare:
        return None
    open_tag = "<parameter="
    if not (middle.endswith(open_tag) and between.endswith(open_tag)):
        return None
    close = between.removesuffix(open_tag)
    head = middle.removesuffix(open_tag)
    calls = _between(twice, _VALUES[0], _NAMES[1])
    if not (last.startswith(close) and bare == head + last.removeprefix(close) and calls and calls.startswith(close)):
        return None
    xml = XmlFrame(open_tag, inner, close)
    return CallFrame(begin, head, calls.removeprefix(close), last.removeprefix(close), xml)


def _call(syntax: Syntax, index: int, name: str, arguments: Arguments) -> dict[str, Any]:
    id = f"functions.{name}:{index}" if syntax.style == "kimi" else "abcdefghi"
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _between(text: str, left: str, right: str) -> str | None:
    _, found, rest = text.partition(left)
    between, ended, _ = rest.partition(right)
    return between if found and ended else None
