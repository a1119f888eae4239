"""Where templates of strangers run: jinja2's immutable sandbox, in which everything that can grow or repeat is counted.

jinja2 keeps templates away from Python; it does not keep them from `9 ** 9 ** 8`, `'a' * 10 ** 9` or loops in loops. Here
each loop, macro and block counts what it runs (by syntax nodes), each operator, method and filter what it will make, each
comparison and output what it looks at. Names that no chat template needs and that are hard to bound are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from moeflux.text.growth import FILTERS, check_widths, of_operator, of_text
from moeflux.text.meter import ITEM_BYTES, TemplateLimit, meter

FREE = frozenset(("default", "d", "first", "last", "length", "count", "items", "abs", "random"))
LAZY = frozenset(("map", "select", "reject", "selectattr", "rejectattr"))
SORTING = frozenset(("sort", "dictsort", "groupby", "unique", "min", "max", "sum"))
ESCAPING = frozenset(("e", "escape", "forceescape", "urlencode", "tojson", "string"))
ABSENT = frozenset(("urlize", "xmlattr", "wordwrap", "slice", "batch", "pprint", "filesizeformat", "striptags"))
_ORDER = ("lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">=")
LOOKING = frozenset(("eq", "equalto", "==", "ne", "!=", "in", "lower", "upper", *_ORDER))  # tests
METHODS: Mapping[type, frozenset[str]] = {
    dict: frozenset(("get", "items", "keys", "values", "copy")),
    list: frozenset(("count", "index", "copy")),
    tuple: frozenset(("count", "index")),
    int: frozenset(("bit_length", "bit_count")),
    float: frozenset(("is_integer",)),
}
MOST_NODES = 20_000  # of syntax; the longest templates that are published have a fifth of it
CALL = 10  # steps that a call costs beside what it runs
MOST_INDENT = 16
MOST_PRECISION = 100


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        extensions: list[type[Extension]] = [_Generation, loopcontrols]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_shown, optimized=False, cache_size=0
        )
        self.code_generator_class = _Counting
        self.globals.pop("lipsum", None)
        self.filters = {name: _guarded(name, f) for name, f in self.filters.items() if name not in ABSENT}
        tests: Mapping[str, Any] = self.tests
        self.tests = {name: _looking(f) if name in LOOKING else f for name, f in tests.items()}

    def add_filter(self, name: str, plain: Callable[..., Any]) -> None:
        self.filters[name] = _guarded(name, plain)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """What macros and blocks wrote."""
        parts = list(pieces)
        meter().make(sum(map(len, parts)) * 4)
        return "".join(parts)

    @staticmethod
    def spend(n: int) -> bool:
        meter().run(n)
        return True

    @staticmethod
    def seen(value: Any) -> Any:
        """The value, which will be looked at from end to end."""
        meter().weigh(value)
        return value

    @staticmethod
    def searched(value: Any) -> Any:
        """The value, in which something will be looked for."""
        if not isinstance(value, Mapping):
            meter().weigh(value)
        return value

    @staticmethod
    def made(value: Any) -> Any:
        meter().make(value.__sizeof__())
        return value

    @staticmethod
    def joined(values: tuple[Any, ...]) -> tuple[Any, ...]:
        meter().make(6 * meter().weigh(values)[1])
        return values

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, str):
            meter().look(len(argument))
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter().make(of_operator(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if __obj is Sandbox.spend:
            return __obj(*args)
        meter().run(CALL + len(args))
        if not isinstance(__obj, Macro):
            args = tuple(map(_listed, args))
            meter().make(meter().weigh([*args, *kwargs.values()])[1])
        if isinstance(__obj, (BuiltinMethodType, MethodType)):
            _check_method(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, wherever it is come by."""
        if super().wrap_str_format(value) is None:
            return None
        form = str(value.__self__)

        def format(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                raise SecurityError("format_map cannot be called in a chat template")
            return _Formatter(self).vformat(form, args, kwargs)

        return format


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        check_widths(format_spec)
        meter().make(8 * meter().weigh(value)[1] + 4 * len(format_spec))
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        meter().make(8 * meter().weigh(value)[1])
        return super().convert_field(value, conversion)


class _Counting(CodeGenerator):
    """Writes Python that counts."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        if (n := sum(1 for _ in node.find_all(nodes.Node))) > MOST_NODES:
            raise TemplateLimit(f"{n} syntax nodes, the limit is {MOST_NODES}")
        repeating: list[Any] = list(node.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)))
        for repeated in repeating:
            n = 1 + sum(1 for _ in repeated.find_all(nodes.Node))
            repeated.body.insert(0, nodes.ExprStmt(_spend(n, repeated.lineno), lineno=repeated.lineno))
            if isinstance(repeated, nodes.For) and repeated.test is not None:
                repeated.test = nodes.And(_spend(n, repeated.lineno), repeated.test, lineno=repeated.lineno)
        node.set_environment(self.environment)
        super().visit_Template(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(environment.seen(")
        self.visit(node.expr, frame)
        self.write(")")
        for operand in node.ops:
            looked = "searched" if operand.op in ("in", "notin") else "seen"
            self.write(f" {operators[operand.op]} environment.{looked}(")
            self.visit(operand.expr, frame)
            self.write(")")
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.made(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        safe = "(markup_join if context.eval_ctx.volatile else str_join)" if frame.eval_ctx.volatile else "str_join"
        self.write(f"{'markup_join' if frame.eval_ctx.autoescape else safe}(environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


def _spend(n: int, line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute("spend"), [nodes.Const(n)], [], None, None, lineno=line)


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training. Here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _shown(value: Any) -> Any:
    """Before it becomes text of the output."""
    if isinstance(value, str):
        meter().look(len(value))
    else:
        meter().make(8 * meter().weigh(value)[1])
    return value


def _check_method(method: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    owner, name = method.__self__, method.__name__
    kind = next((kind for kind in METHODS if isinstance(owner, kind)), None)
    size = of_text(owner, name, args, named) if isinstance(owner, str) else 0
    if size is None or (kind is not None and name not in METHODS[kind]):
        raise SecurityError(f"{name} cannot be called in a chat template")
    meter().make(size)
    if name in ("count", "index", "copy") and kind is not None:
        meter().make(meter().weigh(owner)[1])


def _listed(value: Any) -> Any:
    """Lazy values as lists: their items are counted while they come."""
    if not isinstance(value, Iterator):
        return value
    items = list(meter().each(value))
    meter().make(ITEM_BYTES * len(items))
    return items


def _guarded(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    if name in FREE:
        return plain
    passed = _passed(plain)

    @jinja2.pass_context
    def guarded(context: Context, value: Any, *args: Any, **named: Any) -> Any:
        if name not in LAZY:
            value = _listed(value)
            n_values, n_bytes, n_levels = meter().weigh([value, *args, *named.values()])
            meter().make((20 if name in SORTING else 6 if name in ESCAPING else 3) * n_bytes)
            meter().make(FILTERS[name](value, args, named) if name in FILTERS else 0)
            _check_option(name, args, named, n_values * n_levels)
        result = plain(*passed(context), value, *args, **named)
        return meter().each(result) if isinstance(result, Iterator) else result

    return guarded


def _passed(plain: Callable[..., Any]) -> Callable[[Context], tuple[Any, ...]]:
    """What jinja2 would pass to a filter in front of its value."""
    wants = getattr(plain, "jinja_pass_arg", None)
    given: Mapping[str, Callable[[Context], tuple[Any, ...]]] = {
        "context": lambda context: (context,),
        "eval_context": lambda context: (context.eval_ctx,),
        "environment": lambda context: (context.environment,),
    }
    return given[wants.name] if wants is not None else lambda context: ()


def _check_option(name: str, args: tuple[Any, ...], named: Mapping[str, Any], n: int) -> None:
    """Options that make much of little."""
    options = [*args, *named.values()]
    whole = [option for option in options if isinstance(option, int)]
    if name == "round" and any(abs(option) > MOST_PRECISION for option in whole):
        raise TemplateLimit(f"a precision beyond {MOST_PRECISION}")
    if name == "tojson":
        texts = [text for option in options if isinstance(option, (str, list, tuple)) for text in _texts(option)]
        if any(option > MOST_INDENT for option in whole) or any(len(text) > MOST_INDENT for text in texts):
            raise TemplateLimit(f"an indent or separator of more than {MOST_INDENT} characters")
        meter().make(n * MOST_INDENT if options else 0)
    if name == "sum" and any(isinstance(option, (list, tuple)) for option in options):
        raise TemplateLimit("a sum of lists")


def _texts(option: Any) -> list[str]:
    return [option] if isinstance(option, str) else [item for item in option if isinstance(item, str)]


def _looking(plain: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*values: Any) -> Any:
        meter().weigh(values)
        return plain(*values)

    return guarded
