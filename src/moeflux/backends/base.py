"""The seam between what computes and what keeps sequences: a backend, its costs, and the runner of an open model.

Rooms above hand in their own types, which are matched by shape: a batch, an open model, where its experts come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moeflux.backends.ops import Arrivals, Handle, LayerWeights, Ops, Span
from moeflux.backends.state import Array, LayerState
from moeflux.models.spec import ModelSpec

F32 = npt.NDArray[np.float32]
LayerRecord = Callable[[int, str, Array], None]  # layer, name of an intermediate result, its rows
Parts = tuple[int, ...]  # bytes of each component of a weight


# What a runner is given.


class Cancel(Protocol):
    """A flag that another thread may set."""

    @property
    def native(self) -> Any:
        """The same flag as native code knows it."""

    def check(self) -> None:
        """Raises CancelledError where it is set."""


class Lease(Protocol):
    """Experts that were asked for, in the backend's banks, as they arrive."""

    def arrivals(self, cancel: Any = None) -> Arrivals: ...


class ExpertSource(Protocol):
    """Where routed experts come from."""

    @property
    def native(self) -> Handle | None:
        """The store below, for a backend that leases from it by itself; None where experts are changed on their way."""

    @property
    def recording(self) -> bool:
        """Whether somebody wants to know which experts are chosen: `record` is then told, unless `acquire` is used."""

    def begin_step(self, tokens: Sequence[int], decodes: Sequence[bool]) -> None:
        """Before anything else of a step. `decodes`: by token."""

    def next_token(self) -> None:
        """Before the first layer of a step that leases layer by layer."""

    def record(self, layer: int, ids: Any) -> None: ...

    def acquire(self, layer: int, ids: Any, spans: Sequence[Span] = ()) -> AbstractContextManager[Lease]:
        """ids [T, k]: experts of a layer, each at least once."""

    def open_tier(self, memory: Any) -> DeviceTier:
        """Experts in slots of a device's memory (`store/device.py` says what that must do), above all that is below."""


class DeviceTier(Protocol):
    """Which experts are in which slots of a device."""

    def rounds(self, layer: int, ids: Any, *, sweep: bool = False, cancel: Any = None) -> Iterator[list[int]]:
        """All these experts, some at a time, which are in slots until the next are asked for."""


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


class OpenModel(Protocol):
    @property
    def spec(self) -> ModelSpec: ...

    @property
    def trunk(self) -> TrunkWeights: ...

    @property
    def experts(self) -> ExpertSource: ...


class Batch(Protocol):
    """New tokens of some sequences, which logits are wanted of them, and who records what."""

    def tokens(self) -> list[int]: ...

    def decodes(self) -> list[bool]:
        """By token."""

    def spans(self, layer: int) -> list[Span]: ...

    def states(self) -> Sequence[Sequence[LayerState]]:
        """Of every sequence those of its layers, in the order of the spans."""

    def wanted_rows(self) -> list[int]:
        """Rows whose logits are returned."""

    def handed_rows(self, vocab: int) -> Iterator[tuple[slice, Callable[[F32], None]]]:
        """Rows whose logits are handed out a few at a time, and who takes them."""

    def recorder(self, to_numpy: Callable[[Array], Any]) -> LayerRecord | None:
        """None where nothing is traced."""


# What a backend is.


class Runner(ABC):
    """Drives the layers of one batch at a time on one open model."""

    stream: Handle | None = None  # a native way to the experts that keeps statistics, where there is one

    @abstractmethod
    def run(self, batch: Batch, cancel: Cancel | None = None) -> F32 | None:
        """Advances every state of the batch. Logits [wanted rows, vocab]; None where none are wanted.

        Where it raises, the states of the batch are in no known place.
        """

    @property
    def notes(self) -> tuple[str, ...]:
        """What whoever opened the model should know: what it does not do, and why."""
        return ()

    @abstractmethod
    def discard(self) -> None:
        """After a failure: what is under way is waited for and forgotten."""

    @abstractmethod
    def close(self) -> None: ...


class WeightSizes(Protocol):
    """What a model's files hold, in bytes, as far as backends ask for it."""

    @property
    def trunk(self) -> int: ...

    @property
    def trunk_matrices(self) -> Parts:
        """Components of the trunk's matrices in the order in which they are loaded."""

    @property
    def trunk_vectors(self) -> int:
        """All others in float32."""

    @property
    def trunk_read_per_token(self) -> int: ...

    @property
    def expert_codec(self) -> str: ...

    @property
    def integer(self) -> bool:
        """Whether experts are multiplied as integers."""


@dataclass(frozen=True)
class TierCosts:
    """Bytes of a model in one tier, besides expert slots, states and text."""

    trunk: int = 0
    scratch: int = 0  # of a run over one chunk
    keeps_states: bool = False
    slot: int = 0  # of one expert, where the tier has slots of its own


@dataclass(frozen=True)
class Costs:
    """`vram`: None for a backend without memory of its own."""

    ram: TierCosts
    vram: TierCosts | None = None


@dataclass(frozen=True)
class DeviceRoom:
    """Memory of a device that a backend computes on."""

    title: str
    total: int
    free: int


@dataclass(frozen=True)
class Tiers:
    """What a plan leaves a runner."""

    context: int  # positions of the longest sequence
    device_slots: int = 0  # experts in device memory
    staged_slots: int = 0  # slots there that experts pass through
    host_records: bool = False  # and whether every expert has a place in host memory that the device reads
    progress: Callable[[int, int], None] | None = None  # bytes of experts done, bytes in all


class Backend(ABC):
    """Everything that computes on one kind of device. Cheap to make: `ops` opens threads or the device."""

    name: str
    obeys_budget = True  # whether memory stays within the plan
    streams = True  # whether reads are worth measuring the drive for

    @property
    @abstractmethod
    def ops(self) -> Ops:
        """Primitives and composed blocks, always the same object."""

    @abstractmethod
    def costs(self, spec: ModelSpec, sizes: WeightSizes, chunk: int) -> Costs:
        """What a model takes in each tier where prompts run in chunks of so many tokens."""

    @property
    def room(self) -> DeviceRoom | None:
        """The memory of its device; None where it computes in host memory."""
        return None

    def refusal(self, spec: ModelSpec, sizes: WeightSizes) -> str | None:
        """Why it would run this model slowly, or None. For whoever may choose among backends."""
        return None

    def measure(self, n_bytes: int) -> tuple[int, float, float] | None:
        """Threads, and bytes that they read and integer multiply-adds that they do per second; None: it does not say."""
        return None

    @abstractmethod
    def runner(self, model: OpenModel, tiers: Tiers) -> Runner: ...
