"""A record of what happened to chosen tokens in chosen layers, to find out where two runs part.

    trace = Trace(layers=[3], positions=[-1])      # or Trace() for everything
    engine.score(ids, trace=trace)
    trace[3, "mixer"]                              # [T, hidden], float32
    print(trace)                                   # a table of what was recorded
    print(trace.compare(other))                    # worst difference per record, in the order of computation

Per layer, in order: `input`, `mixer`, `ffn_input` (after the second norm), `router_logits`, `router_ids`,
`router_weights`, `experts`, `shared`, `output`. Outside layers: (-1, "embedding") and (n, "final") before the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeflux.core.atomic_file import write_atomically

Values = npt.NDArray[Any]
Key = tuple[int, str]


class Trace:
    """Records rows as they are computed; chunks of one sequence are joined."""

    def __init__(self, layers: Sequence[int] | None = None, positions: Sequence[int] | None = None) -> None:
        """`positions` are absolute; negative ones count from the end of what was recorded."""
        self._layers = None if layers is None else frozenset(layers)
        self._positions = None if positions is None else tuple(positions)
        self._rows: dict[Key, list[tuple[int, Values]]] = {}

    def wants(self, layer: int) -> bool:
        return self._layers is None or layer in self._layers

    def record(self, layer: int, name: str, position: int, rows: Values) -> None:
        """Rows of tokens at position, position + 1, ... Copied, because blocks may work in place."""
        if self.wants(layer):
            self._rows.setdefault((layer, name), []).append((position, np.array(rows)))

    def keys(self) -> list[Key]:
        """In the order of computation."""
        return list(self._rows)

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def __getitem__(self, key: Key) -> Values:
        chunks = sorted(self._rows[key], key=lambda chunk: chunk[0])
        rows: Values = np.concatenate([values for _, values in chunks])
        if self._positions is None:
            return rows
        first = chunks[0][0]
        return rows[[p - first if p >= 0 else p for p in self._positions]]

    def compare(self, other: Trace, tolerance: float = 1e-4) -> Comparison:
        """Records that both have, in this trace's order."""
        rows = tuple(_difference(key, self[key], other[key]) for key in self.keys() if key in other)
        return Comparison(rows, tolerance)

    def save(self, path: Path | str) -> None:
        """As .npz (added to a name that does not end so) with keys like `3.mixer`."""
        arrays = {f"{layer}.{name}": self[layer, name] for layer, name in self.keys()}
        named = Path(path) if str(path).endswith(".npz") else Path(f"{path}.npz")
        write_atomically(named, lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        trace = cls()
        with np.load(path) as stored:
            for key in stored.files:
                layer, _, name = key.partition(".")
                trace.record(int(layer), name, 0, stored[key])
        return trace

    def __str__(self) -> str:
        lines = [f"{'layer':>5}  {'record':<14} {'shape':<16} {'rms':>10} {'max |x|':>10}"]
        for layer, name in self.keys():
            values = self[layer, name]
            x = values.astype(np.float64)
            shape = "x".join(str(n) for n in values.shape)
            lines.append(f"{layer:>5}  {name:<14} {shape:<16} {np.sqrt(np.mean(x * x)):>10.4g} {np.abs(x).max():>10.4g}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Difference:
    layer: int
    name: str
    worst: float  # largest absolute difference; infinity where shapes differ
    row: int  # the row it is in
    scale: float  # root mean square of the first trace's values


@dataclass(frozen=True)
class Comparison:
    rows: tuple[Difference, ...]
    tolerance: float

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.rows)

    @property
    def worst(self) -> float:
        return max((row.worst for row in self.rows), default=0.0)

    @property
    def first(self) -> Difference | None:
        """The first record, in the order of computation, that differs by more than the tolerance."""
        return next((row for row in self.rows if not row.worst <= self.tolerance), None)

    def __str__(self) -> str:
        lines = [f"{'layer':>5}  {'record':<14} {'max |diff|':>10} {'at row':>6} {'rms':>10}"]
        for row in self.rows:
            mark = "  <- first above tolerance" if row is self.first else ""
            lines.append(f"{row.layer:>5}  {row.name:<14} {row.worst:>10.3g} {row.row:>6} {row.scale:>10.4g}{mark}")
        return "\n".join(lines)


def _difference(key: Key, a: Values, b: Values) -> Difference:
    layer, name = key
    scale = float(np.sqrt(np.mean(a.astype(np.float64) ** 2)))
    if a.shape != b.shape:
        return Difference(layer, name, float("inf"), 0, scale)
    gaps = np.abs(a.astype(np.float64) - b.astype(np.float64)).reshape(len(a), -1).max(axis=-1)
    row = int(np.argmax(np.where(np.isnan(gaps), np.inf, gaps)))
    return Difference(layer, name, float(gaps[row]), row, scale)
