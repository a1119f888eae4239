"""Which calls a model may write, and what that means for its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ToolChoice:
    """`auto`: as the model likes. `none`: no calls, though the tools stay in the prompt. `required`: at least one.

    `names`: only these tools; none: all of them. `parallel`: whether several calls may come in one answer.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True


AUTO = ToolChoice()
