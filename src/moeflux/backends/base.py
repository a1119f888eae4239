"""What a backend that drives whole steps needs to know of an open model. Matched by shape: the runtime's own types fit.

The rest of the seam (a `Backend` with costs and a `Runner` that the engine calls instead of walking the layers) is not here
yet; docs/gpu.md says what it has to carry.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from moeflux.backends.ops import Arrivals, Handle, LayerWeights


class Lease(Protocol):
    """Experts that were asked for, in the backend's banks, as they arrive."""

    def arrivals(self) -> Arrivals: ...


class ExpertSource(Protocol):
    """Where routed experts come from."""

    def acquire(self, layer: int, ids: Any) -> AbstractContextManager[Lease]:
        """ids [T, k]: experts of a layer, each at least once."""


class TrunkWeights(Protocol):
    """The resident weights as the backend loaded them."""

    @property
    def embedding(self) -> Handle: ...

    @property
    def layers(self) -> tuple[LayerWeights, ...]: ...

    @property
    def final_norm(self) -> Handle: ...

    @property
    def head(self) -> Handle: ...
