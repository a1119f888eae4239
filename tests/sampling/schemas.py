"""Random JSON schemas: nested, with enums, patterns and limits, all of them satisfiable."""

from __future__ import annotations

from hypothesis import strategies as st

keys = st.sampled_from(["a", "name", "größe", 'q"uote', "with space", "x_1", "\\", "漢"])
fixed = st.sampled_from([1.5, -0.25, "🙂", ""])
scalars = st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=6) | fixed
PATTERNS = [r"^[a-z]{2,5}$", r"^\d{3}-[A-F]{2}$", r"^(yes|no|maybe)$", r"^[^0-9\s]{1,4}$", r"^v\d+\.\d+$", r"^a+b?$"]


def _between(low, high, name):
    """Two limits in order, either may be missing."""
    return st.builds(
        lambda a, b: {f"min{name}": min(a, b), f"max{name}": max(a, b)}, st.integers(low, high), st.integers(low, high)
    )


def _typed(kind, *parts):
    return st.builds(lambda *found: {"type": kind, **{k: v for part in found for k, v in part.items()}}, *parts)


patterned = st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern})
strings = _typed("string", _between(0, 8, "Length")) | patterned
whole = st.builds(lambda low, n, exclusive: {
    "type": "integer", **({"exclusiveMinimum": low} if exclusive else {"minimum": low}), "maximum": low + 1 + n,
}, st.integers(-5000, 5000), st.integers(0, 300), st.booleans())  # fmt: skip
numbers = st.builds(
    lambda low, n: {"type": "number", "minimum": low, "maximum": low + n}, st.integers(-50, 50), st.integers(1, 40)
)
multiples = st.integers(2, 7).map(lambda n: {"type": "integer", "multipleOf": n, "minimum": 0, "maximum": 100})
enums = st.lists(scalars | st.lists(scalars, max_size=2), min_size=1, max_size=5).map(lambda values: {"enum": values})
consts = (scalars | st.dictionaries(keys, scalars, max_size=2)).map(lambda value: {"const": value})
either = st.sampled_from([["string", "null"], ["boolean", "null"]]).map(lambda kinds: {"type": kinds, "maxLength": 3})
simple = st.sampled_from([{"type": "null"}, {"type": "boolean"}])
leaves = strings | whole | numbers | multiples | enums | consts | either | simple


def _objects(inner):
    def build(properties, required, extra):
        needed = [key for key, wanted in zip(properties, required, strict=False) if wanted]
        return {"type": "object", "properties": properties, "required": needed, "additionalProperties": extra}

    flags = st.lists(st.booleans(), min_size=8, max_size=8)
    return st.builds(build, st.dictionaries(keys, inner, max_size=4), flags, st.just(False) | st.just({"type": "boolean"}))


def _arrays(inner):
    plain = _typed("array", inner.map(lambda items: {"items": items}), _between(0, 3, "Items"))
    tuples = st.lists(inner, min_size=1, max_size=3).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    )
    return plain | tuples


def _choices(inner):
    return st.lists(inner, min_size=2, max_size=3).map(lambda options: {"anyOf": options})


schemas = st.recursive(leaves, lambda inner: _objects(inner) | _arrays(inner) | _choices(inner), max_leaves=8)


def _with_definition(schema, shared):
    """Some part said once and referred to twice."""
    return {
        "$defs": {"shared": shared},
        "type": "object",
        "properties": {"one": {"$ref": "#/$defs/shared"}, "two": {"$ref": "#/$defs/shared"}, "rest": schema},
        "required": ["one", "rest"],
        "additionalProperties": False,
    }


any_schema = schemas | st.builds(_with_definition, schemas, leaves)
