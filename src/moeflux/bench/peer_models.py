"""The two models of a comparison: random weights of one shape, in our layout and in llama.cpp's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeflux.bench.gguf import gguf_bytes, write_gguf
from moeflux.bench.shapes import published_config
from moeflux.bench.synthetic import Progress, write_checkpoint
from moeflux.core.errors import OptionError
from moeflux.core.units import format_bytes

SHAPES = ("qwen3-30b-a3b", "qwen3.5-35b-a3b")


@dataclass(frozen=True)
class Models:
    """Both models of one shape in one folder, written if they are not there."""

    config: Mapping[str, Any]
    layers: int
    ours: Path
    theirs: Path

    @staticmethod
    def of(shape: str, layers: int | None, folder: Path) -> Models:
        if shape not in SHAPES:
            raise OptionError(f"{shape!r} cannot be compared", where="shape", hint=f"one of: {', '.join(SHAPES)}")
        config = published_config(shape, layers)
        n = config.get("text_config", config)["num_hidden_layers"]
        name = f"{shape}-{n}"
        return Models(config, n, folder / f"{name}-mlx", folder / f"{name}-q4_0.gguf")

    @property
    def files(self) -> list[Path]:
        return [*sorted(self.ours.glob("*.safetensors")), self.theirs]

    @property
    def missing(self) -> int:
        """Bytes to write, about: both models have the same size but for small tensors."""
        size = gguf_bytes(self.config)
        return size * (int(not self._has_ours) + int(not self._has_theirs))

    def write(self, progress: Progress | None = None) -> None:
        """Refuses when the drive has no room, before anything is written."""
        folder, missing = self.ours.parent, self.missing
        folder.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(folder).free) < missing:
            what = f"needs {format_bytes(missing)}, and {format_bytes(free)} are free"
            raise OptionError(what, where=str(folder), hint="give another folder with --dir, or fewer --layers")
        if not self._has_ours:
            write_checkpoint(self.config, self.ours, progress=progress)
        if not self._has_theirs:
            write_gguf(self.config, self.theirs, progress=progress)
        os.sync()  # what is still being written slows down whoever is measured first

    @property
    def _has_ours(self) -> bool:
        return (self.ours / "config.json").exists()  # written last

    @property
    def _has_theirs(self) -> bool:
        return self.theirs.exists() and self.theirs.stat().st_size == gguf_bytes(self.config)
