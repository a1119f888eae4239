"""From tokens to parts: characters made whole, regions split, stop sequences found. One stream for one generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moeflux.text.detokenize import Detokenizer
from moeflux.text.regions import Part, Splitter, Text
from moeflux.text.stops import Stops
from moeflux.text.tokenizer import Tokenizer


class TextStream:
    """With a splitter, special tokens that mark nothing are not shown; without one, everything is text.

    Stop sequences are looked for in text for the reader only; after one was found, nothing more comes out.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: str | Sequence[str] | None = (), splitter: Splitter | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = Stops(stops)
        self._splitter = splitter
        if splitter is not None:
            splitter.watch(self._stops)

    @property
    def stopped_by(self) -> str | None:
        return self._stops.found

    @property
    def reasoning(self) -> bool:
        return self._splitter is not None and self._splitter.reasoning

    @property
    def whole(self) -> bool:
        """Whether no character is unfinished."""
        return self._detokenizer.whole

    def add(self, token: int) -> tuple[Part, ...]:
        """What became certain with this token."""
        return tuple(self._read(token)) if self.stopped_by is None else ()

    def finish(self) -> tuple[Part, ...]:
        """What was held back."""
        return tuple(self._rest())

    def _read(self, token: int) -> Iterator[Part]:
        splitter = self._splitter
        if splitter is None:
            yield from _as_text(self._stops.add(self._detokenizer.add(token)))
        elif token in splitter.tokens or token in self._tokenizer.special:
            yield from splitter.add(self._detokenizer.finish())
            if token in splitter.tokens:
                yield from splitter.mark(token)
        else:
            yield from splitter.add(self._detokenizer.add(token))

    def _rest(self) -> Iterator[Part]:
        left = self._detokenizer.finish()
        if self._splitter is None:
            yield from _as_text(self._stops.add(left) + self._stops.finish())
        else:
            yield from self._splitter.add(left)
            yield from self._splitter.finish()


def _as_text(text: str) -> Iterator[Part]:
    if text:
        yield Text(text)
