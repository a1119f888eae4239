"""Everything about a model that concerns text, read when it is first needed and kept."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from moeflux.core.config import TextUse
from moeflux.core.errors import BudgetError, ConfigError, InputError, MoefluxError, OptionError
from moeflux.core.json_file import read_json
from moeflux.models.fields import Fields
from moeflux.models.spec import ModelSpec
from moeflux.sampling.constraint import Vocabulary
from moeflux.sampling.params import SamplingParams
from moeflux.text.chat import ChatFormat
from moeflux.text.tokenizer import Tokenizer

TRUNCATION = ("top_k", "top_p", "min_p")  # say nothing where the most likely token is taken anyway


class ModelText:
    def __init__(self, folder: Path, spec: ModelSpec, use: TextUse = "all") -> None:
        """`use`: what memory was planned for; anything beyond is refused."""
        self._folder, self._use = folder, use
        self._spec = spec
        path = folder / "generation_config.json"
        self._path = path
        self._config: Mapping[str, Any] = read_json(path) if path.exists() else {}

    @property
    def has_tokenizer(self) -> bool:
        """One that may be used."""
        return self._use != "none" and (self._folder / "tokenizer.json").exists()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if self._use == "none":
            raise _not_planned("text", "plain")
        return Tokenizer.open(self._folder)

    @cached_property
    def chat(self) -> ChatFormat:
        return ChatFormat.open(self._folder, self.tokenizer)

    @property
    def has_chat(self) -> bool:
        """Whether it can hold a conversation."""
        if not self.has_tokenizer:
            return False
        try:
            return self.chat is not None
        except MoefluxError:
            return False

    @cached_property
    def vocabulary(self) -> Vocabulary:
        if self._use != "all":
            raise _not_planned("constrained output", "all")
        tokenizer = self.tokenizer
        if not tokenizer.is_byte_level:
            raise InputError("output cannot be constrained: the tokens of this model are not strings of bytes")
        pieces = [tokenizer.piece(id) for id in range(tokenizer.n_ids)]
        return Vocabulary(pieces, tokenizer.added.values(), self.ends, tokenizer.encode_plain)

    @property
    def vocab(self) -> int:
        """Ids that the model can be given."""
        return self._spec.vocab

    @property
    def n_ids(self) -> int:
        """Ids from there on stand for nothing."""
        return min(self._spec.vocab, self.tokenizer.n_ids) if self.has_tokenizer else self._spec.vocab

    @cached_property
    def ends(self) -> frozenset[int]:
        """Every id that ends a text, whichever of the checkpoint's files says so."""
        with _named(self._path):
            found = {*self._spec.eos, *Fields(self._config).ints("eos_token_id", high=self._spec.vocab)}
        eos = self.tokenizer.named_id("eos_token") if self.has_tokenizer else None
        return frozenset(found if eos is None or eos >= self._spec.vocab else {*found, eos})

    @cached_property
    def defaults(self) -> SamplingParams:
        """How the checkpoint wants to be sampled: greedily unless it says otherwise."""
        with _named(self._path):
            fields = Fields(self._config)
            told = any(fields.has(name) for name in ("temperature", *TRUNCATION))
            if not fields.flag("do_sample", default=told):
                return SamplingParams(repetition_penalty=fields.number("repetition_penalty", default=1.0))
            try:
                return SamplingParams(
                    temperature=fields.number("temperature", default=1.0),
                    top_k=fields.whole("top_k", default=0, low=0),
                    top_p=fields.number("top_p", default=1.0),
                    min_p=fields.number("min_p", default=0.0),
                    repetition_penalty=fields.number("repetition_penalty", default=1.0),
                )
            except OptionError as error:
                raise ConfigError(error.what, where=f"config.json: {error.where}", hint=error.hint) from error

    def sampling(self, **changes: Any) -> SamplingParams:
        """The checkpoint's way with changes. Truncation asks for sampling where the checkpoint would not sample."""
        asked = [name for name in TRUNCATION if name in changes]
        if asked and self.defaults.greedy and "temperature" not in changes:
            changes = {"temperature": 1.0, **changes}
        params = self.defaults.changed(**changes)
        if asked and params.greedy:
            raise OptionError(
                "does nothing at temperature 0, which takes the most likely token",
                where=f"option {asked[0]!r}",
                hint="leave it out, or give a temperature",
            )
        return params


def _not_planned(what: str, use: TextUse) -> BudgetError:
    hint = f"load the model with text={use!r}"
    return BudgetError(f"no memory is planned for {what}", where="option 'text'", hint=hint)


class _named:
    """Errors about the fields of another file than config.json name that file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConfigError) and error.where:
            error.where = error.where.replace("config.json", str(self._path), 1)
