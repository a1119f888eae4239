"""The options of an engine, resolved once and frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moeflux.core.errors import OptionError

BACKENDS = ("numpy",)

_NOT_YET = {
    "threads": "the numpy backend uses whatever threads its BLAS library was built with",
    "ram": "there is no expert store yet that could obey a budget: experts are read when they are needed and then dropped",
    "vram": "there is no GPU backend yet",
    "context": "sequences grow as needed and reserve nothing, so there is no limit to set",
}


@dataclass(frozen=True)
class EngineConfig:
    """What `load` was asked for. Options that would do nothing are refused rather than ignored."""

    model: Path
    backend: str = "auto"
    threads: int | None = None
    ram: int | str | None = None
    vram: int | str | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        for name, reason in _NOT_YET.items():
            if getattr(self, name) is not None:
                raise OptionError(f"not available: {reason}", where=f"option {name!r}", hint=f"leave {name!r} out")
        if self.backend not in ("auto", *BACKENDS):
            raise OptionError(
                f"unknown backend {self.backend!r}", where="option 'backend'", hint=f"one of: auto, {', '.join(BACKENDS)}"
            )

    @property
    def resolved_backend(self) -> str:
        return BACKENDS[0] if self.backend == "auto" else self.backend
