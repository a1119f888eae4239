"""What answers cost, and the log-probabilities of their tokens, as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeflux.session import events
from moeflux.session.events import Token
from moeflux.text.tokenizer import Tokenizer


def usage_of(finished: Sequence[tuple[int, events.Usage]]) -> dict[str, Any]:
    """Of all answers: a prompt's number and usage. A prompt that was answered several times counts once."""
    prompts: dict[int, events.Usage] = {}
    for prompt, usage in finished:
        prompts.setdefault(prompt, usage)
    asked = sum(usage.prompt for usage in prompts.values())
    said = sum(usage.completion for _, usage in finished)
    cached, written = (sum(getattr(usage, name, 0) for usage in prompts.values()) for name in ("cached", "kept"))
    return {
        "prompt_tokens": asked,
        "completion_tokens": said,
        "total_tokens": asked + said,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning for _, usage in finished)},
    }


def shown(tokenizer: Tokenizer, id: int) -> str:
    return tokenizer.piece(id).decode(errors="replace")


def logprob_of(tokenizer: Tokenizer, token: Token) -> dict[str, Any]:
    """A token that a constraint forced was no choice of the model: it costs nothing."""
    top = [_likely(tokenizer, id, logprob) for id, logprob in token.top]
    return {**_likely(tokenizer, token.id, token.logprob or 0.0), "top_logprobs": top}


def _likely(tokenizer: Tokenizer, id: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.piece(id)
    return {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}
