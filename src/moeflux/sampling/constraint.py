"""Output that must fit a JSON schema, a regular expression or a grammar: which tokens may come, and which must.

`Vocabulary` is made once for a model, a `Constraint` for each answer. Tokens that end a text are allowed exactly where the
output is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from reprlib import repr as shown
from typing import Any, Literal, get_args

import llguidance
import numpy as np

from moeflux.core.errors import InputError, OptionError, StateError
from moeflux.sampling.choose import Allowed
from moeflux.sampling.levels import check_levels

# One way to set JSON apart: where white space is free, a model can lose itself in it, and nothing is ever forced.
JSON_STYLE: llguidance._lib.JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
# Ways that the parser follows at once. Each alternative and each optional property is one to four, each open level of a
# right-recursive rule one: thousands are legitimate. A token then costs up to 0.2 s, and memory stays in the megabytes.
ROW_ITEMS, STEP_ITEMS = 50_000, 500_000
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=ROW_ITEMS,
    step_max_items=STEP_ITEMS,
    verbose_errors=False,  # messages without pages of parser state
)
_OVER_LIMIT = re.compile(r"max is|limit|too many|too complex|too large|fuel|panic", re.IGNORECASE)
MOST_BEGUN = 32  # compiled grammars that are kept
PROBED = 8  # choices; where a grammar is too much at all, it shows within them
Kind = Literal["schema", "regex", "lark"]
NAMES: Mapping[Kind, str] = {"schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}


@dataclass(frozen=True)
class Grammar:
    """`schemas`: of values that a Lark grammar refers to by name (`@name`), as pairs of name and JSON text."""

    kind: Kind
    text: str
    schemas: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise OptionError(f"{shown(self.kind)} is none of {', '.join(get_args(Kind))}", where="option 'grammar'")
        if not isinstance(self.text, str):
            raise InputError(f"a {NAMES[self.kind]} is a text, not {shown(self.text)}")

    @classmethod
    def schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """Of a JSON schema, as an object or as JSON text."""
        try:
            return cls("schema", schema if isinstance(schema, str) else json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"this JSON schema cannot be used: it is not JSON: {shown(str(error))}") from error

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str, schemas: Mapping[str, str] | None = None) -> Grammar:
        """A context-free grammar in Lark's notation, as llguidance reads it."""
        return cls("lark", grammar, tuple((schemas or {}).items()))

    def compile(self) -> str:
        matcher = llguidance.LLMatcher
        try:
            match self.kind:
                case "schema":
                    return matcher.grammar_from_json_schema(self.text, defaults=JSON_STYLE)
                case "regex":
                    return matcher.grammar_from_regex(self.text)
                case "lark" if self.schemas:
                    return self._compile_all()
                case "lark":
                    return matcher.grammar_from_lark(self.text)
        except ValueError as error:
            raise _refused(self, str(error)) from error

    def _compile_all(self) -> str:
        named = [
            {"name": name, "json_schema": {**json.loads(schema), "x-guidance": JSON_STYLE}} for name, schema in self.schemas
        ]
        return json.dumps({"grammars": [{"lark_grammar": self.text}, *named]})


class Vocabulary:
    """The tokens as llguidance needs them. Seconds for a quarter of a million."""

    def __init__(
        self, pieces: Sequence[bytes], added: Collection[int], ends: Collection[int], encode: Callable[[str], list[int]]
    ) -> None:
        """`pieces`: the bytes of each id. `added`: ids that are never part of a text, `ends` those that end one.

        `encode` must not give added tokens for what merely spells them: the grammar would not take them.
        """
        if not ends:
            raise InputError("output cannot be constrained: the model names no token that ends a text")
        tokenizer = llguidance.TokenizerWrapper(_Tokens(pieces, sorted(added), min(ends), encode))
        self._tokenizer = llguidance.LLTokenizer(tokenizer, eos_token=sorted(ends))
        self._begun = lru_cache(MOST_BEGUN)(self._begin)  # an agent sends the same tools with every request

    def constrain(self, grammar: Grammar) -> Constraint:
        """A grammar that nothing can fit, or that is too much to follow, is refused here and not in mid-answer."""
        if not isinstance(grammar, Grammar):
            hint = "give Grammar.schema(…), Grammar.regex(…) or Grammar.lark(…)"
            raise OptionError(f"{shown(grammar)} does not say what it is", where="option 'grammar'", hint=hint)
        return Constraint(self._begun(grammar).deep_copy(), self._tokenizer.vocab_size)

    def _begin(self, grammar: Grammar) -> llguidance.LLMatcher:
        check_levels(grammar.kind, grammar.text)
        for _, schema in grammar.schemas:
            check_levels("schema", schema)
        compiled = grammar.compile()
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(compiled, self._tokenizer, limits=LIMITS)
        if failed:
            raise _refused(grammar, "; ".join(messages))
        matcher = llguidance.LLMatcher(self._tokenizer, compiled, log_level=0, limits=LIMITS)
        try:
            Constraint(matcher, self._tokenizer.vocab_size).allowed()
        except StateError as error:
            raise _refused(grammar, "nothing fits it") from error
        except InputError as error:
            raise _refused(grammar, error.what) from error
        self._probe(grammar, matcher.deep_copy())
        return matcher

    def _probe(self, grammar: Grammar, matcher: llguidance.LLMatcher) -> None:
        """A few choices ahead: what is forced without end never ends, and what is too much mostly begins with it."""
        probe = Constraint(matcher, self._tokenizer.vocab_size)
        for _ in range(PROBED):
            if probe.finished:
                return
            forced = probe.forced()
            try:
                probe.advance(forced or [int(np.argmax(probe.allowed()))])
            except (StateError, InputError) as error:
                raise _refused(grammar, "what it forces never ends" if forced else error.what) from error


class Constraint:
    """How far an output is along its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, n_tokens: int) -> None:
        self._matcher = matcher
        self._n_tokens = n_tokens
        self._check()

    @property
    def finished(self) -> bool:
        """The output is complete and nothing can follow."""
        return self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """The output could end here."""
        return self._matcher.is_accepting()

    def allowed(self) -> Allowed:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._n_tokens, bitorder="little").view(np.bool_)

    def forced(self) -> list[int]:
        """Tokens that must come now, for there is no choice. Advance with them like with any other."""
        return list(self._matcher.compute_ff_tokens())

    def advance(self, tokens: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(tokens))
        self._check()

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        why = re.split("<non-verbose|<backtrace", self._matcher.get_error())[0].strip()
        if _OVER_LIMIT.search(why):
            raise InputError(
                f"the constraint is too much to follow: {why}",
                where="option 'grammar'",
                hint=f"the parser follows up to {ROW_ITEMS} ways at once: use fewer alternatives, optional properties or "
                "levels, or smaller repetitions in patterns",
            )
        raise StateError(f"the constraint cannot go on: {why}")


@dataclass(frozen=True)
class _Tokens:
    """Under the names that llguidance looks for."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    eos_token_id: int
    encode: Callable[[str], list[int]]
    bos_token_id: int | None = None

    def __call__(self, text: str) -> list[int]:
        """The bytes as they are: a tokenizer may normalise a text, and the grammar would not take what it makes of it."""
        ids, wanted = self.encode(text), text.encode()
        return ids if b"".join(self.tokens[i] for i in ids) == wanted else self._longest(wanted)

    def _longest(self, data: bytes) -> list[int]:
        """The longest token that fits, again and again; ends early where none does."""
        ids = []
        while data:
            fitting = [n for n in range(min(len(data), self._most), 0, -1) if data[:n] in self._by_bytes]
            if not fitting:
                break
            ids.append(self._by_bytes[data[: fitting[0]]])
            data = data[fitting[0] :]
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {piece: i for i, piece in enumerate(self.tokens) if piece and i not in special}

    @cached_property
    def _most(self) -> int:
        return max(map(len, self._by_bytes), default=0)


def _refused(grammar: Grammar, why: str) -> InputError:
    return InputError(f"this {NAMES[grammar.kind]} cannot be used: {why}", where="option 'grammar'")
