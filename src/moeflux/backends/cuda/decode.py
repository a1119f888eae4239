"""Decoding on the device: a whole token as one graph of six phases a layer, experts in slots, argmax and next embedding
included. The host only replays it and reads tokens.

States stay those of the sequence: the graph finds them through a table of places that `bind` fills. Bits are those of the
composed blocks, with and without the graph, and with and without programmatic dependent launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any
from weakref import ref

import numpy as np
import torch

from moeflux.backends.cuda.memory import Tensor
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.cuda.phases import DecodeOptions, Phases
from moeflux.backends.cuda.pool import ExpertPool
from moeflux.backends.cuda.prompt import PromptStep
from moeflux.backends.cuda.step_weights import Ends, prepare, refusal
from moeflux.backends.ops import LayerWeights
from moeflux.backends.state import DeltaState, KvState, LayerState
from moeflux.core.errors import DeviceError, StateError
from moeflux.core.log import log
from moeflux.models.spec import Attention

UNIT = 16  # bytes that places count in


class Decoder:
    """Of one model. Holds no sequence: `bind` lends it the states of one."""

    def __init__(
        self, ops: CudaOps, layers: Sequence[LayerWeights], ends: Ends, pool: ExpertPool, options: DecodeOptions
    ) -> None:
        if reason := refusal(layers, ends):
            raise DeviceError(
                f"no decode step for this model: {reason}", where="backend 'cuda'", hint="run it block by block"
            )
        self._device, self._ends, self._options = ops.device, ends, options
        self._ops, self._pool, self._layers = ops, pool, [prepare(layer) for layer in layers]
        self._phases = Phases(ops.device, self._layers, ends, pool, _angles(ops, layers, options), options)
        self._buffers = self._phases.buffers
        self._tokens = self._buffers.tokens.numpy()
        self._attending = [i for i, layer in enumerate(layers) if isinstance(layer.spec.mixer, Attention)]
        self._graph: Any = None
        self._states: Sequence[LayerState] | None = None
        self._last: ref[LayerState] | None = None  # of the sequence that was stepped last
        self._entered: list[tuple[int, int]] | None = None  # blocks that the table of places was made of
        self._length = 0

    # Lending states.

    def bind(self, states: Sequence[LayerState], length: int, token: int) -> None:
        """Go on from these states, which hold `length` tokens; `token` is the next to run."""
        if any(rows.storage.dtype != "BF16" for state in states for rows in state.rows.values()):
            raise StateError("the decode step keeps keys and values in bf16", where="option 'kv'", hint="use kv='bf16'")
        self._states, self._length = states, length
        self._choose(token)
        self._entered = None

    def _choose(self, token: int) -> None:
        """Which one is next."""
        if self._device.name != "cpu":
            torch.cuda.current_stream().synchronize()  # the one that was chosen before may not have been read yet
        self._phases.enter(token, self._length)

    def reserve(self, n: int) -> None:
        """Room for n more tokens in the bound states, which count as there from now on."""
        assert self._states is not None
        if self._length + n > self._options.context:
            raise StateError(f"{self._length + n} tokens, but this decoder holds {self._options.context}")
        for i in self._attending:
            for rows in self._states[i].rows.values():
                missing = self._length + n - len(rows)
                if missing > 0:
                    rows.extend(missing)
        self._enter_places()

    def _enter_places(self) -> None:
        """Where they changed since the last time."""
        assert self._states is not None
        kept = [rows for i in self._attending for rows in self._states[i].rows.values()]
        now = [(len(rows.blocks), rows.blocks[-1].address if rows.blocks else 0) for rows in kept]
        if now == self._entered:
            return
        self._entered = now
        places = np.zeros(self._buffers.places.shape, dtype=np.int64)
        base_f32, base_rows = self._buffers.hidden.data_ptr(), self._buffers.rows_base.data_ptr()
        for i, state in enumerate(self._states):
            if isinstance(state, DeltaState):
                places[i, 0, 0] = (state.conv.data_ptr() - base_f32) // UNIT
                places[i, 1, 0] = (state.delta.data_ptr() - base_f32) // UNIT
            elif isinstance(state, KvState):
                for side, rows in enumerate((state.keys, state.values)):
                    found = [(block.address - base_rows) // UNIT for block in rows.blocks]
                    places[i, side, : len(found)] = found
        self._buffers.places.copy_(torch.from_numpy(places))

    # Running.

    def step(self, states: Sequence[LayerState], length: int, token: int) -> Tensor:
        """One token of one sequence, which is not held on to. Its logits, good until the next step; they may still be
        under way. The sequence of the last step needs no binding, and the token of its largest logit is there already."""
        prepared = self._last is not None and self._last() is states[0] and length == self._length
        if not prepared:
            self.bind(states, length, token)
        elif self._tokens[length % len(self._tokens)] != token:
            self._choose(token)
        self._states, self._last = states, None  # a step that fails is not followed
        self.reserve(1)
        if self._device.name == "cpu":
            self._phases.launch()
        else:
            self._replay()
        self._length += 1
        self._states, self._last = None, ref(states[0])
        return self._buffers.logits

    def forget(self) -> None:
        """Somebody else moves states on: the next step binds anew."""
        self._last = None

    def tokens(self, n: int) -> Iterator[int]:
        """n tokens by the largest logit, each given out when the device has it. The next step is already under way then."""
        self.reserve(n)
        if self._device.name == "cpu":
            for _ in range(n):
                self._phases.launch()
                self._length += 1
                yield int(self._tokens[self._length % len(self._tokens)])
            return
        events: list[Any] = []
        for i in range(n + 1):
            if i < n:
                self._replay()
                event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                events.append(event)
            if i > 0:
                events[i - 1].synchronize()
                self._length += 1
                yield int(self._tokens[self._length % len(self._tokens)])

    @property
    def logits(self) -> Tensor:
        """Of the last step: [vocabulary]."""
        return self._buffers.logits

    @property
    def phases(self) -> Phases:
        return self._phases

    @cached_property
    def prompt(self) -> PromptStep | None:
        """Runs chunks of prompts through all layers; None where its kernels cannot be had: the composed blocks must do."""
        if self._phases.compiled is None:
            return None
        try:
            return PromptStep(self._ops, self._layers, self._ends, self._pool, self._options.eps)
        except DeviceError as error:
            if self._options.kernels == "cuda":
                raise
            log.warning("prompts run block by block, which is slower: %s", error)
            return None

    def _replay(self) -> None:
        if not self._options.graph:
            self._phases.launch()
            return
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()

    def _capture(self) -> Any:
        """Kernels are compiled by a first run, whose effects on the states are undone."""
        assert self._states is not None
        kept = [(a, a.clone()) for s in self._states for a in s.arrays.values()]
        kept += [(b, b.clone()) for b in self._buffers.kept]
        torch.cuda.synchronize()  # what was bound and kept lies on another stream
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._phases.launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._phases.launch()
        for array, before in kept:
            array.copy_(before)
        torch.cuda.synchronize()
        return graph


def _angles(ops: CudaOps, layers: Sequence[LayerWeights], options: DecodeOptions) -> tuple[Tensor, Tensor]:
    found = {layer.spec.mixer.rope for layer in layers if isinstance(layer.spec.mixer, Attention)}
    if len(found) > 1:
        raise DeviceError("layers with different rotations", where="backend 'cuda'")
    none = torch.zeros(1, device=ops.device.name)
    return ops.angles(found.pop(), options.context) if found else (none, none)
