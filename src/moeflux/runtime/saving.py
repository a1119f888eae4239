"""Snapshots to and from files. Nothing of a file is used before all of it has been checked against the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moeflux.backends.numerics import NUMERICS_VERSION
from moeflux.backends.state import LayerState
from moeflux.core.errors import SnapshotError
from moeflux.formats.snapshot import Section, SnapshotFile, write_snapshot
from moeflux.runtime.snapshot import Snapshot

TOKENS = "tokens"


@dataclass(frozen=True)
class Identity:
    """What a state depends on besides its tokens."""

    model_type: str
    fingerprint: str  # of the weights
    kv: str
    backend: str  # others compute the same to some digits only
    numerics: str  # the class of its arithmetic, see backends/numerics.py
    numerics_version: int = NUMERICS_VERSION


def save_snapshot(
    path: Path,
    snapshot: Snapshot,
    identity: Identity,
    sampler: Any = None,
    make_room: Callable[[int], None] | None = None,
) -> int:
    """`sampler`: whatever JSON can hold; it is given back as it is. Returns the bytes written.

    `make_room` is told the bytes of the file before the first is written.
    """
    about = {**asdict(identity), "sampler": sampler}
    return write_snapshot(path, about, list(_sections(snapshot)), make_room)


def _sections(snapshot: Snapshot) -> Iterator[Section]:
    yield Section(TOKENS, "I32", (len(snapshot),), [snapshot.tokens])
    for i, state in enumerate(snapshot.states):
        for part in state.copy_out():
            yield Section(_name(i, part.name), part.dtype, part.shape, part.parts)


def load_snapshot(
    path: Path, states: tuple[LayerState, ...], identity: Identity, vocab: int, check_length: Callable[[int], None]
) -> tuple[Snapshot, Any]:
    """`states`: empty ones of the model, which are filled. Returns the snapshot and what the sampler had left.

    `check_length` gets the number of tokens before there is memory for them, and raises where they are too many.
    """
    with SnapshotFile(path) as file:
        check_identity(file, identity)
        _check_sections(file, states)
        check_length(file.sections[TOKENS].shape[0])
        tokens = file.read(TOKENS)
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab):
            raise SnapshotError("holds tokens that are not in the vocabulary", where=str(path))
        for i, state in enumerate(states):
            state.copy_in(len(tokens), partial(_read, file, i))
        return Snapshot(tokens, states), file.about.get("sampler")


def _read(file: SnapshotFile, layer: int, name: str, parts: Sequence[Any]) -> None:
    file.read_into(_name(layer, name), parts)


def check_identity(file: SnapshotFile, identity: Identity) -> None:
    for name, ours in asdict(identity).items():
        words, hint = _WORDS[name]
        if name not in file.about:
            what = f"does not say with {words} it was made, this is {ours!r}: an older moeflux wrote it"
            raise SnapshotError(what, where=str(file.path), hint=_RUN_AGAIN)
        theirs = file.about[name]
        if theirs != ours:
            what = f"was made with {words} {theirs!r}, this is {ours!r}"
            raise SnapshotError(what, where=str(file.path), hint=hint.format(theirs))


_RUN_AGAIN = "run the prompt again"
_WORDS = {
    "model_type": ("a model of type", _RUN_AGAIN),
    "fingerprint": ("the weights", _RUN_AGAIN),
    "kv": ("keys and values as", "load the model with kv={!r}"),
    "backend": ("the backend", "load the model with backend={!r}"),
    "numerics": ("the arithmetic", "run the prompt again, or use the instruction set that made it: bits differ"),
    "numerics_version": ("arithmetic of version", "the arithmetic has changed since; run the prompt again"),
}


def _check_sections(file: SnapshotFile, states: tuple[LayerState, ...]) -> None:
    tokens = file.sections.get(TOKENS)
    if tokens is None or tokens.dtype != "I32" or len(tokens.shape) != 1:
        raise SnapshotError("has no list of tokens", where=str(file.path))
    expected = dict(_expected(states, tokens.shape[0]))
    found = {name: (e.dtype, e.shape) for name, e in file.sections.items() if name != TOKENS}
    for name in {*expected, *found}:
        if expected.get(name) != found.get(name):
            raise SnapshotError(
                f"section {name!r} is {found.get(name, 'missing')}, the model needs {expected.get(name, 'none')}",
                where=str(file.path),
            )


def _expected(states: tuple[LayerState, ...], n: int) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    for i, state in enumerate(states):
        for name, rows in state.rows.items():
            yield _name(i, name), (rows.storage.dtype, (n, *rows.row_shape))
        for name, array in state.arrays.items():
            yield _name(i, name), ("F32", tuple(array.shape))


def _name(layer: int, name: str) -> str:
    return f"layers.{layer}.{name}"
