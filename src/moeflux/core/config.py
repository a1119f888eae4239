"""The options of an engine, resolved once and frozen."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moeflux.core.errors import OptionError

BACKENDS = ("native", "numpy")
ISAS = ("auto", "avx512_vnni", "avx2", "generic")

_NOT_YET = {
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
    isa: str = "auto"
    ring: int = 0  # deferred expert dispatches in flight, where a backend runs layer by layer

    def __post_init__(self) -> None:
        for name, reason in _NOT_YET.items():
            if getattr(self, name) is not None:
                raise OptionError(f"not available: {reason}", where=f"option {name!r}", hint=f"leave {name!r} out")
        if self.backend not in ("auto", *BACKENDS):
            raise OptionError(
                f"unknown backend {self.backend!r}", where="option 'backend'", hint=f"one of: auto, {', '.join(BACKENDS)}"
            )

        if self.isa not in ISAS:
            raise OptionError(
                f"unknown instruction set {self.isa!r}", where="option 'isa'", hint=f"one of: {', '.join(ISAS)}"
            )
        if self.resolved_backend == "numpy":
            for name, default in (("threads", None), ("isa", "auto")):
                if getattr(self, name) != default:
                    raise OptionError(
                        "not available: the numpy backend uses its BLAS library as it is",
                        where=f"option {name!r}",
                        hint="use the native backend",
                    )
        threads = self.threads
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 1024):
            raise OptionError(f"{threads!r} is not a number of threads", where="option 'threads'", hint="1 to 1024")

    @property
    def n_threads(self) -> int:
        """As asked, or one for each core that this process may use."""
        return self.threads if self.threads is not None else len(os.sched_getaffinity(0))

    @property
    def resolved_backend(self) -> str:
        return BACKENDS[0] if self.backend == "auto" else self.backend
