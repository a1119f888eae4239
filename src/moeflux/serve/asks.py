"""What a dialect wants of the worker, in neutral words."""

from __future__ import annotations

from dataclasses import dataclass

from moeflux.session.handle import RequestOptions
from moeflux.session.work import AnyPrompt


@dataclass(frozen=True)
class Ask:
    """One prompt, and one answer to it. `beside`: the place of an earlier ask with the same prompt, whose state this one
    starts from; it is submitted once that one's prompt was run."""

    prompt: AnyPrompt
    options: RequestOptions
    beside: int | None = None
