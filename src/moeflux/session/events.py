"""What a generation tells: a token at a time with what became certain through it, and at the end what it was and cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from moeflux.core.errors import MoefluxError
from moeflux.runtime.prefill import PrefillProgress
from moeflux.store.stats import ExpertUse
from moeflux.text.regions import Part, Text

Reason = Literal["end", "length", "context", "stop_sequence", "complete", "cancelled"]


@dataclass(frozen=True)
class Token:
    """One generated token, and the parts of the answer that became certain with it (none within a character)."""

    id: int
    parts: tuple[Part, ...] = ()
    logprob: float | None = None  # where asked for: of the model's own distribution
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens with theirs
    forced: bool = False  # the constraint left no choice, so it cost no step
    reasoning: bool = False  # part of the thoughts, the marker that ends them included

    @property
    def text(self) -> str:
        """For the reader: without reasoning and tool calls."""
        return text_of(self.parts)


@dataclass(frozen=True)
class PromptTokens:
    """`said`: how many of them there are up to the end of the last message."""

    ids: tuple[int, ...]
    said: int


@dataclass(frozen=True)
class Queued:
    """A request waits: so many come before it."""

    place: int
    prompt: PromptTokens = PromptTokens((), 0)


@dataclass(frozen=True)
class Started:
    """A request runs from now on; so many tokens of its prompt were known."""

    cached: int


@dataclass(frozen=True)
class Scored:
    """The prompt was run, and its own tokens were scored: each with its log-probability, but for the first."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Usage:
    prompt: int  # tokens,
    cached: int  # of them, those that the sequence held already
    completion: int  # generated tokens, an ending one not counted,
    reasoning: int  # of them, those inside reasoning,
    forced: int  # and those that a constraint forced
    kept: int = 0  # tokens of the prompt that were run and whose state is kept: they can be read next time


@dataclass(frozen=True)
class Timings:
    """Seconds."""

    prefill: float  # until the prompt was run
    first: float  # until the first token
    total: float

    def tok_s(self, usage: Usage) -> float | None:
        """Generated tokens per second after the first."""
        seconds = self.total - self.first
        return (usage.completion - 1) / seconds if usage.completion > 1 and seconds > 0 else None


@dataclass(frozen=True)
class Finish:
    """`end`: the model ended. `length`: max_tokens. `context`: it is full. `complete`: the rules left nothing to say."""

    reason: Reason
    usage: Usage
    timings: Timings
    store: ExpertUse  # what its tokens took of the expert store, and nobody else's
    seed: int | None  # that reproduces it; None where nothing was drawn
    stop_sequence: str | None = None
    parts: tuple[Part, ...] = ()  # what was held back where it was cancelled between two tokens

    def drive_share(self, bytes_s: float | None) -> float | None:
        """What was read, of what a drive of this rate could have given meanwhile; None where nothing can be said."""
        if not bytes_s or not self.store.bytes_read or not self.timings.total:
            return None
        return self.store.bytes_read / (bytes_s * self.timings.total)

    def as_dict(self) -> dict[str, Any]:
        store = {"hit_rate": self.store.hit_rate, "bytes_read": self.store.bytes_read, "stall_s": self.store.stall_ns / 1e9}
        return {
            "finish_reason": self.reason,
            "stop_sequence": self.stop_sequence,
            "usage": asdict(self.usage),
            "timings": {**asdict(self.timings), "tok_s": self.timings.tok_s(self.usage)},
            "store": store,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Failed:
    """The last event of a request that could not be answered."""

    error: MoefluxError


Event = (
    Queued | Started | PrefillProgress | Scored | Token | Finish | Failed
)  # a request's: the last is a Finish or a Failed


def text_of(parts: tuple[Part, ...]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text) and part.region == "text")
