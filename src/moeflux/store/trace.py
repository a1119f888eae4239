"""Routing traces: which experts every token asked for in every layer, in one small file.

A trace judges policies, sizes and predictions without a model: see moeflux.store.replay.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeflux.core.atomic_file import write_atomically
from moeflux.core.errors import FormatError, ReadError, StateError

FORMAT = 1


@dataclass(frozen=True)
class RoutingTrace:
    """Rows are tokens in the order in which they were run. Tokens of one step were run together."""

    model: str
    n_experts: int
    layers: tuple[int, ...]  # numbers of the layers with experts
    ids: npt.NDArray[np.int16]  # [T, L, K]
    tokens: npt.NDArray[np.int32]  # [T]
    steps: npt.NDArray[np.int32]  # [T], ascending
    decodes: npt.NDArray[np.bool_]  # [T]: or is part of a prompt

    def __len__(self) -> int:
        return len(self.ids)

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        arrays: dict[str, Any] = {
            "format": np.int64(FORMAT),
            "model": np.array(self.model),
            "n_experts": np.int64(self.n_experts),
            "layers": np.array(self.layers, dtype=np.int32),
            "ids": self.ids,
            "tokens": self.tokens,
            "steps": self.steps,
            "decodes": self.decodes,
        }
        write_atomically(path, lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))

    @classmethod
    def load(cls, path: Path) -> RoutingTrace:
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
        except OSError as error:
            raise ReadError(error.strerror or str(error), where=str(path)) from error
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise FormatError(f"not a routing trace: {error}", where=str(path)) from error
        return _checked(arrays, str(path))


def _checked(a: dict[str, npt.NDArray[Any]], where: str) -> RoutingTrace:
    def require(holds: bool, what: str) -> None:
        if not holds:
            raise FormatError(f"not a routing trace: {what}", where=where)

    names = ("format", "model", "n_experts", "layers", "ids", "tokens", "steps")
    missing = [name for name in names if name not in a]
    require(not missing, f"{', '.join(missing)} missing")
    require(a["format"].ndim == 0 and int(a["format"]) == FORMAT, f"format {a['format']}, this is {FORMAT}")
    ids, layers, n = a["ids"], a["layers"], len(np.atleast_1d(a["ids"]))
    require(ids.ndim == 3 and ids.dtype == np.int16, f"ids of shape {list(ids.shape)} and type {ids.dtype}")
    require(layers.dtype == np.int32 and layers.shape == ids.shape[1:2], f"{layers.shape} layers for {ids.shape[1]}")
    for name in ("tokens", "steps"):
        require(a[name].dtype == np.int32 and a[name].shape == (n,), f"{name} of shape {list(a[name].shape)} for {n} rows")
    n_experts = int(a["n_experts"]) if a["n_experts"].ndim == 0 and a["n_experts"].dtype == np.int64 else 0
    require(n_experts > 0, "n_experts")
    require(ids.size == 0 or (ids.min() >= 0 and ids.max() < n_experts), f"expert {ids.max(initial=0)} of {n_experts}")
    require(bool((np.diff(a["steps"]) >= 0).all()), "steps do not ascend")
    decodes = a.get("decodes", _alone(a["steps"]))
    require(decodes.dtype == np.bool_ and decodes.shape == (n,), f"decodes of shape {list(decodes.shape)} for {n} rows")
    return RoutingTrace(str(a["model"]), n_experts, tuple(layers.tolist()), ids, a["tokens"], a["steps"], decodes)


def _alone(steps: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """[T]: rows that were a step of their own. In a file that does not say, these decode."""
    _, step, n = np.unique(steps, return_inverse=True, return_counts=True)
    return np.asarray(n[step] == 1)


class TraceRecorder:
    """Gathers the choices of a running model: `begin` a step with its tokens, `record` every layer.

    A step that was not finished, because something failed within it, is left out.
    """

    def __init__(self, model: str, layers: Sequence[int], n_experts: int, k: int) -> None:
        self._model = model
        self._layers = tuple(layers)
        self._n_experts = n_experts
        self._k = k
        self._done: list[npt.NDArray[np.int16]] = []
        self._tokens: list[npt.NDArray[np.int32]] = []
        self._decodes: list[npt.NDArray[np.bool_]] = []
        self._open: dict[int, npt.NDArray[np.int16]] = {}
        self._open_tokens: npt.NDArray[np.int32] | None = None
        self._open_decodes = np.empty(0, dtype=bool)

    def begin(self, tokens: Sequence[int] | npt.NDArray[np.integer], decodes: Sequence[bool] | None = None) -> None:
        """`decodes`: by token; where it is not said, one token alone does."""
        self._finish()
        self._open_tokens = np.asarray(tokens, dtype=np.int32).reshape(-1)
        n = len(self._open_tokens)
        self._open_decodes = np.full(n, n == 1) if decodes is None else np.asarray(decodes, dtype=bool)

    def record(self, layer: int, ids: npt.NDArray[np.integer]) -> None:
        """ids [T, K]"""
        if self._open_tokens is None:
            raise StateError("no step was begun", where=f"layer {layer}")
        if layer not in self._layers or ids.shape != (len(self._open_tokens), self._k):
            raise StateError(f"ids of shape {list(ids.shape)} do not belong here", where=f"layer {layer}")
        self._open[layer] = ids.astype(np.int16)

    def last_step(self) -> npt.NDArray[np.int16]:
        """[T, L, K] of the latest step that was finished."""
        self._finish()
        if not self._done:
            raise StateError("nothing was recorded yet")
        return self._done[-1]

    def trace(self) -> RoutingTrace:
        self._finish()
        empty = np.empty((0, len(self._layers), self._k), dtype=np.int16)
        steps = np.repeat(np.arange(len(self._tokens), dtype=np.int32), [len(tokens) for tokens in self._tokens])
        tokens = np.concatenate([np.empty(0, dtype=np.int32), *self._tokens])
        decodes = np.concatenate([np.empty(0, dtype=bool), *self._decodes])
        ids = np.concatenate([empty, *self._done])
        return RoutingTrace(self._model, self._n_experts, self._layers, ids, tokens, steps, decodes)

    def save(self, path: Path) -> None:
        self.trace().save(path)

    def _finish(self) -> None:
        if self._open_tokens is not None and len(self._open) == len(self._layers) and len(self._open_tokens):
            self._done.append(np.stack([self._open[layer] for layer in self._layers], axis=1))
            self._tokens.append(self._open_tokens)
            self._decodes.append(self._open_decodes)
        self._open, self._open_tokens = {}, None
