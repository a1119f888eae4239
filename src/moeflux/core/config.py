"""The options of an engine, resolved once and frozen."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from moeflux.core.errors import OptionError
from moeflux.core.units import parse_bytes

BACKENDS = ("native", "numpy", "cuda")
ISAS = ("auto", "avx512_vnni", "avx_vnni", "avx2", "generic")
Kv = Literal["bf16", "f32"]  # how keys, values and latents are kept
Hints = Literal["none", "previous", "lookahead", "both"]  # how experts that later layers will want are foreseen
Scales = Literal["auto", "kept", "streamed"]  # of all experts, where not every expert is in memory
TextUse = Literal["all", "plain", "none"]  # what memory is kept for: text and constraints, text alone, token ids only
CHOICES = {
    "backend": ("auto", *BACKENDS),
    "isa": ISAS,
    "kv": get_args(Kv),
    "hints": get_args(Hints),
    "scales": get_args(Scales),
    "text": get_args(TextUse),
    "policy": ("lru", "lfru"),
    "reader": ("native", "python"),
}

_NO_DEVICE = "the {} backend computes in host memory"

# By backend: options that would do nothing there, what they are left at, the reason, and who has them.
_REFUSED = {
    "numpy": (
        ("threads", (None,), "the numpy backend uses its BLAS library as it is", "native"),
        ("isa", ("auto",), "the numpy backend uses its BLAS library as it is", "native"),
        ("ram", (None,), "the numpy backend decodes weights whenever it needs them and obeys no budget", "native"),
        ("vram", (None, 0), _NO_DEVICE.format("numpy"), "cuda"),
    ),
    "native": (
        ("ring", (0,), "the native backend runs all layers in one call and defers no dispatch", "numpy"),
        ("vram", (None, 0), _NO_DEVICE.format("native"), "cuda"),
    ),
    "cuda": (
        ("threads", (None,), "the cuda backend computes on the GPU", "native"),
        ("isa", ("auto",), "the cuda backend computes on the GPU", "native"),
        ("ring", (0,), "the cuda backend runs a decoded token as one graph and defers no dispatch", "numpy"),
    ),
    "auto": (("ring", (0,), "neither the native nor the cuda backend defers a dispatch", "numpy"),),
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
    hints: Hints = "both"
    policy: str = "lfru"
    reader: Literal["native", "python"] = "native"
    slots: int | None = None  # experts in memory at most; None: as many as the budget holds
    scales: Scales = "auto"  # of all experts: kept in memory, or read with each expert; auto: what is likely faster
    ring: int = 0  # deferred expert dispatches in flight: of backends that run layer by layer, refused elsewhere
    kv: Kv = "bf16"
    sequences: int = 1  # that run at the same time, each as long as the context
    prefixes: int | str = 0  # bytes for states that are kept to be used again
    k: int | None = None  # lossy: experts per token, fewer than the model's own
    bits: int | None = None  # lossy: experts requantised to so many bits whenever they are used; slow, for measuring only
    text: TextUse = "all"  # what is planned for: text and constrained output, text alone, or token ids only
    checkpoints: int = 2  # states that each sequence can go back to, where a state cannot be cut

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                what = {"isa": "instruction set"}.get(name, name)
                raise OptionError(
                    f"unknown {what} {value!r}", where=f"option {name!r}", hint=f"one of: {', '.join(choices)}"
                )
        for name, allowed, reason, other in _REFUSED[self.backend]:
            if (self.vram_bytes if name == "vram" else getattr(self, name)) not in allowed:
                raise OptionError(f"not available: {reason}", where=f"option {name!r}", hint=f"use the {other} backend")
        _check_count("threads", self.threads, "threads", 1024)
        _check_count("ring", self.ring, "dispatches", 1024, least=0)
        _check_count("context", self.context, "tokens", 2**31)
        _check_count("slots", self.slots, "experts", 2**31)
        _check_count("sequences", self.sequences, "sequences", 4096)
        _check_count("checkpoints", self.checkpoints, "checkpoints", 4096)
        _check_count("k", self.k, "experts", 2**31)
        _check_count("bits", self.bits, "bits", 8)
        _ = self.ram_bytes, self.prefix_bytes  # raises where they cannot be read
        if self.vram_bytes == 0 and self.backend == "cuda":
            raise OptionError("leaves the GPU nothing", where="option 'vram'", hint="use the native backend, or more")

    @property
    def ram_bytes(self) -> int | None:
        """The budget of the whole process; None: what is free."""
        return None if self.ram is None else _parse("ram", self.ram)

    @property
    def vram_bytes(self) -> int | None:
        """Of the GPU; None: what is free there. 0: no GPU is looked for."""
        return None if self.vram is None else _parse("vram", self.vram)

    @property
    def prefix_bytes(self) -> int:
        return _parse("prefixes", self.prefixes)

    @property
    def n_threads(self) -> int:
        """As asked, or one for each core that this process may use."""
        return self.threads if self.threads is not None else len(os.sched_getaffinity(0))

    @property
    def resolved_backend(self) -> str:
        """As asked; where that is left open, the one that runs everywhere. An open engine's config names its own."""
        return BACKENDS[0] if self.backend == "auto" else self.backend


def _parse(name: str, value: int | str) -> int:
    try:
        return parse_bytes(value)
    except OptionError as error:
        error.where = f"option {name!r}"
        raise


def _check_count(name: str, value: int | None, of: str, most: int, least: int = 1) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
        raise OptionError(f"{value!r} is not a number of {of}", where=f"option {name!r}", hint=f"{least} to {most}")
