"""How clients ask for sampling, brought to what a model takes.

Clients send values that do nothing ("top_p": 1 beside "temperature": 0). Python callers are told so; on the wire it is
custom, and no mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from moeflux.session.model_text import TRUNCATION, ModelText

_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


@dataclass(frozen=True)
class Sampling:
    """None: not said."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None

    def for_model(self, text: ModelText) -> dict[str, Any]:
        """Changes to the model's own way."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        changes = {name: value for name, value in said.items() if value is not None}
        if changes.get("top_k") == -1:  # all, as others write it
            changes["top_k"] = 0
        if changes.get("top_p") == 0:  # only the most likely one, as others write it
            del changes["top_p"]
            changes["top_k"] = 1
        if (seed := changes.get("seed")) is not None and seed < 0:
            del changes["seed"]
        greedy = changes.get("temperature", 1 if not text.defaults.greedy else None) == 0
        undecided = "temperature" not in changes and text.defaults.greedy
        for name in TRUNCATION:
            if name in changes and (greedy or (undecided and changes[name] == _NEUTRAL[name])):
                del changes[name]
        return changes

    def for_answer(self, text: ModelText, index: int) -> dict[str, Any]:
        """As `for_model`, for one of several answers: each draws with a seed of its own."""
        changes = self.for_model(text)
        if "seed" in changes:
            changes["seed"] = (changes["seed"] + index) % 2**64
        return changes
