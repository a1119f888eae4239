"""Decoding on the device: a whole token as one graph of six phases a layer, experts in slots, argmax and next embedding
included. The host only replays it and reads tokens.

States stay those of the sequence: the graph finds them through a table of places that `bind` fills. Bits are those of the
composed blocks, with and without the graph, and with and without programmatic dependent launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moeflux.backends.cuda.device import Device
from moeflux.backends.cuda.kernels import decode_attention, step
from moeflux.backends.cuda.memory import AffineMatrix, Tensor
from moeflux.backends.cuda.pool import ExpertPool
from moeflux.backends.ops import LayerWeights
from moeflux.backends.rope import frequencies, rotation_scale
from moeflux.backends.state import BLOCK, DeltaState, KvState, LayerState
from moeflux.core.errors import DeviceError, StateError
from moeflux.models.spec import Attention, DeltaNet, Moe, Rope

SQUARES = 16  # neighbours whose squares are summed by whoever writes them, as in kernels/step.py
FILL = 64  # joined matrices are filled up to a multiple of so many rows
CHUNK = 32  # positions of one attention program, as in kernels/mixers.py
HEAD_PROGRAMS = 396  # three for each multiprocessor of an H100 or H200
UNIT = 16  # bytes that places count in


@dataclass(frozen=True)
class Tile:
    """Rows of a matrix that one program computes, and its warps. Changes no bit."""

    rows: int = 16
    warps: int = 8


@dataclass(frozen=True)
class Tiles:
    """Chosen on an H200."""

    project: Tile = Tile(64, 8)
    delta: Tile = Tile(16, 4)
    attend: Tile = Tile(0, 8)
    output: Tile = Tile(32, 8)
    route: Tile = Tile(16, 4)
    gate_up: Tile = Tile(16, 8)
    down: Tile = Tile(16, 4)
    head: Tile = Tile(32, 8)


@dataclass(frozen=True)
class DecodeOptions:
    """`context`: positions at most. `graph`: replay one graph per token. `pdl`: phases overlap at their edges."""

    context: int
    eps: float
    graph: bool = True
    pdl: bool = True
    tiles: Tiles = Tiles()


@dataclass(frozen=True)
class Ends:
    """What stands before and behind the layers."""

    embedding: AffineMatrix
    final_norm: Tensor
    head: AffineMatrix


@dataclass(frozen=True)
class StepLayer:
    """One layer as its kernels want it: input projections joined by rows, and the router with the shared expert's gate."""

    w: LayerWeights
    inputs: AffineMatrix
    router: AffineMatrix

    @property
    def delta(self) -> bool:
        return isinstance(self.w.spec.mixer, DeltaNet)


class Decoder:
    """Of one model. Holds no sequence: `bind` lends it the states of one."""

    def __init__(
        self, device: Device, layers: Sequence[LayerWeights], ends: Ends, pool: ExpertPool, options: DecodeOptions
    ) -> None:
        self._device, self._ends, self._pool, self._options = device, ends, pool, options
        self._layers = [_prepare(layer) for layer in layers]
        self._hidden = len(ends.final_norm)
        self._buffers = Buffers(device, self._layers, ends, options)
        self._cos, self._sin = self._angles()
        self._graph: Any = None
        self._states: Sequence[LayerState] | None = None
        self._length = 0

    # Lending states.

    def bind(self, states: Sequence[LayerState], length: int, token: int) -> None:
        """Go on from these states, which hold `length` tokens; `token` is the next to run."""
        if length >= self._options.context:
            raise StateError(f"{length} tokens, but this decoder holds {self._options.context}")
        self._states, self._length = states, length
        b = self._buffers
        b.position.fill_(length)
        b.tokens[length % len(b.tokens)] = token
        row = self._ends.embedding
        b.hidden.copy_(_decoded_row(row, token))
        b.squares.copy_(_squares(b.hidden))
        self._enter_places()

    def reserve(self, n: int) -> None:
        """Room for n more tokens in the bound states, which count as there from now on."""
        assert self._states is not None
        for state in self._states:
            if isinstance(state, KvState):
                missing = self._length + n - len(state.keys)
                if missing > 0:
                    state.keys.extend(missing)
                    state.values.extend(missing)
        self._enter_places()

    def _enter_places(self) -> None:
        assert self._states is not None
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

    def tokens(self, n: int) -> Iterator[int]:
        """n tokens by the largest logit, each given out when the device has it. The next step is already under way then."""
        self.reserve(n)
        if self._device.name == "cpu":
            for _ in range(n):
                self.launch()
                self._length += 1
                yield int(self._buffers.tokens[self._length % len(self._buffers.tokens)])
            return
        events = []
        for i in range(n + 1):
            if i < n:
                self._replay()
                event = torch.cuda.Event()
                event.record()
                events.append(event)
            if i > 0:
                events[i - 1].synchronize()
                self._length += 1
                yield int(self._buffers.tokens[self._length % len(self._buffers.tokens)])

    @property
    def logits(self) -> Tensor:
        """Of the last step: [vocabulary]."""
        return self._buffers.logits

    @property
    def hidden(self) -> Tensor:
        return self._buffers.hidden

    def _replay(self) -> None:
        if not self._options.graph:
            self.launch()
            return
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()

    def _capture(self) -> Any:
        """Kernels are compiled by a first run, whose effects on the states are undone."""
        assert self._states is not None
        kept = [(a, a.clone()) for s in self._states for a in s.arrays.values()]
        kept += [(b, b.clone()) for b in self._buffers.kept]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.launch()
        for array, before in kept:
            array.copy_(before)
        torch.cuda.synchronize()
        return graph

    def launch(self, mask: int = 255) -> None:
        """All phases of one token. `mask`: which kinds, for measuring one alone."""
        for i, layer in enumerate(self._layers):
            self._mix(i, layer, mask)
            self._feed(i, layer, mask)
        if mask & 64:
            self._finish()

    def _flags(self) -> dict[str, Any]:
        return {"DP4A": self._device.dp4a, "PDL": self._pdl}

    @property
    def _pdl(self) -> bool:
        return self._options.pdl and self._device.dp4a

    def _how(self, tile: Tile) -> dict[str, Any]:
        how: dict[str, Any] = {"num_warps": tile.warps, "enable_fp_fusion": False}
        return how | {"launch_pdl": True} if self._pdl else how

    def _mix(self, i: int, layer: StepLayer, mask: int) -> None:
        b, eps, w, spec = self._buffers, self._options.eps, layer.inputs, layer.w.spec.mixer
        groups, log, tiles = self._hidden // 64, _log(self._hidden), self._options.tiles
        m = layer.w.mixer
        taps, a_log, dt = (m[n] if layer.delta else b.hidden for n in ("conv1d", "A_log", "dt_bias"))
        channels, gates, heads = _widths(spec)
        if mask & 1:
            step.project_kernel[(-(-w.rows // tiles.project.rows),)](
                w.codes, w.scales, w.biases, b.hidden, b.squares, layer.w.mixer_norm, eps, b.inputs, b.hidden, b.places[i, 0], taps,
                a_log, dt, channels, gates, heads, groups, log, tiles.project.rows, layer.delta, **self._flags(), **self._how(tiles.project),
            )  # fmt: skip
        if mask & 2:
            if isinstance(spec, DeltaNet):
                step.delta_kernel[(heads * spec.value_dim // tiles.delta.rows,)](
                    b.inputs, b.hidden, b.places[i, 1], b.mixed, spec.n_key_heads, heads // spec.n_key_heads, channels,
                    gates, heads, spec.key_dim**-0.5, spec.value_dim, tiles.delta.rows, _log(spec.key_dim), PDL=self._pdl,
                    **self._how(tiles.delta),
                )  # fmt: skip
            else:
                self._attend(i, layer)
        if mask & 4:
            out = m["out_proj" if layer.delta else "o_proj"]
            z = b.inputs[channels:] if layer.delta else b.inputs
            norm = m["norm"] if layer.delta else b.hidden
            n_heads, head_log = (heads, _log(spec.value_dim)) if isinstance(spec, DeltaNet) else (1, 0)
            step.output_kernel[(out.rows // tiles.output.rows,)](
                out.codes, out.scales, out.biases, b.mixed, z, norm, eps, b.hidden, b.squares, out.groups, n_heads, head_log,
                tiles.output.rows, layer.delta, **self._flags(), **self._how(tiles.output),
            )  # fmt: skip

    def _attend(self, i: int, layer: StepLayer) -> None:
        b, spec, m = self._buffers, layer.w.spec.mixer, layer.w.mixer
        assert isinstance(spec, Attention)
        stride = spec.head_dim * (2 if spec.gated else 1)
        ratio, half = spec.n_heads // spec.n_kv_heads, spec.rope.dim // 2
        decode_attention.attend_kernel[(spec.n_kv_heads * b.n_chunks,)](
            b.inputs, m["q_norm"], m["k_norm"], self._options.eps, self._cos, self._sin, b.rows_base, b.places[i, 0],
            b.places[i, 1], b.parts, b.position, spec.head_dim**-0.5, b.n_chunks, BLOCK, spec.n_kv_heads, ratio, stride,
            spec.head_dim, _log(spec.head_dim), half, PDL=self._pdl, **self._how(self._options.tiles.attend),
        )  # fmt: skip
        wide = min(64, spec.head_dim)
        decode_attention.join_kernel[(spec.n_heads * spec.head_dim // wide,)](
            b.parts, b.inputs, b.mixed, b.position, b.n_chunks, spec.gated, stride, spec.head_dim, wide, PDL=self._pdl,
            **self._how(Tile(0, 2)),
        )  # fmt: skip

    def _feed(self, i: int, layer: StepLayer, mask: int) -> None:
        b, eps, f, pool, spec = self._buffers, self._options.eps, layer.w.ffn, self._pool, layer.w.spec.ffn
        assert isinstance(spec, Moe)
        groups, log, r, tiles = self._hidden // 64, _log(self._hidden), layer.router, self._options.tiles
        gate, up, down = (f[f"shared_{name}_proj"] for name in ("gate", "up", "down"))
        k, experts, routers = spec.router.k, spec.router.n_experts, r.rows // tiles.route.rows
        norm = layer.w.ffn_norm
        if mask & 8:
            step.route_kernel[(routers + gate.rows // tiles.route.rows,)](
                r.codes, r.scales, r.biases, gate.codes, gate.scales, gate.biases, up.codes, up.scales, up.biases, b.hidden,
                b.squares, norm, eps, b.router, b.inner[k * spec.width :], routers, groups, log,
                tiles.route.rows, **self._flags(), **self._how(tiles.route),
            )  # fmt: skip
        if mask & 16:
            step.gate_up_kernel[(k * spec.width // tiles.gate_up.rows,)](
                pool.words, pool.scales, pool.table[i], b.router, b.hidden, b.squares, norm, eps, b.inner, pool.shape.slot_words, k,
                experts, spec.width, groups, log, tiles.gate_up.rows, **self._flags(), **self._how(tiles.gate_up),
            )  # fmt: skip
        if mask & 32:
            step.down_kernel[(self._hidden // tiles.down.rows,)](
                pool.words, pool.scales, pool.table[i], down.codes, down.scales, down.biases, b.router, b.inner, b.hidden,
                b.squares, spec.router.scale, pool.shape.slot_words, k, experts, spec.width, groups, _log(k), tiles.down.rows, **self._flags(),
                **self._how(tiles.down),
            )  # fmt: skip

    def _finish(self) -> None:
        b, ends, eps = self._buffers, self._ends, self._options.eps
        head, table, n = ends.head, ends.embedding, len(b.best)
        step.head_kernel[(n,)](
            head.codes, head.scales, head.biases, b.hidden, b.squares, ends.final_norm, eps, b.logits, b.best, b.index, head.rows,
            self._hidden // 64, _log(self._hidden), self._options.tiles.head.rows, 3, **self._flags(),
            **self._how(self._options.tiles.head),
        )  # fmt: skip
        step.next_kernel[(1,)](
            b.best, b.index, n, table.codes, table.scales, table.biases, b.hidden, b.squares, b.position, b.tokens, len(b.tokens),
            1 << _log(n), self._hidden, PDL=self._pdl, **self._how(Tile()),
        )  # fmt: skip

    def _angles(self) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, dim / 2], computed as `ops.rotate` does."""
        found = {layer.w.spec.mixer.rope for layer in self._layers if isinstance(layer.w.spec.mixer, Attention)}
        if len(found) > 1:
            raise DeviceError("layers with different rotations", where="backend 'cuda'")
        rope: Rope | None = next(iter(found), None)
        if rope is None:
            return self._buffers.hidden, self._buffers.hidden
        angles = np.arange(self._options.context)[:, None] * frequencies(rope)
        tables = ((f(angles) * rotation_scale(rope)).astype(np.float32) for f in (np.cos, np.sin))
        cos, sin = (torch.from_numpy(table).to(self._device.name) for table in tables)
        return cos, sin


class Buffers:
    """Fixed memory between the phases. Nothing in it outlives a step but hidden state, position and tokens."""

    def __init__(self, device: Device, layers: Sequence[StepLayer], ends: Ends, options: DecodeOptions) -> None:
        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device.name)

        moe, hidden = layers[0].w.spec.ffn, len(ends.final_norm)
        assert isinstance(moe, Moe)
        attention = [layer.w.spec.mixer for layer in layers if isinstance(layer.w.spec.mixer, Attention)]
        self.n_chunks = -(-options.context // CHUNK)
        size = max((a.n_heads * self.n_chunks * (a.head_dim + 8) for a in attention), default=1)
        self.hidden, self.squares = new(hidden), new(hidden // SQUARES)
        self.inputs = new(max(layer.inputs.rows for layer in layers))
        self.mixed = new(max(_output(layer).cols for layer in layers))
        self.router = new(max(layer.router.rows for layer in layers))
        self.inner = new(moe.router.k * moe.width + moe.shared_width)
        self.parts = new(size)
        self.logits = new(ends.head.rows)
        n = min(HEAD_PROGRAMS, ends.head.rows // options.tiles.head.rows)
        self.best, self.index = new(n), new(n, dtype=torch.int32)
        self.position = new(1, dtype=torch.int32)
        self.places = new(len(layers), 2, -(-options.context // BLOCK) + 1, dtype=torch.int64)
        self.rows_base = new(8, dtype=torch.bfloat16)
        tokens = torch.zeros(max(16, options.context), dtype=torch.int32)
        self.tokens = tokens.pin_memory() if device.dp4a else tokens  # the device writes into host memory

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """What one step leaves for the next."""
        return self.hidden, self.squares, self.position, self.tokens


def _prepare(w: LayerWeights) -> StepLayer:
    if isinstance(w.spec.mixer, DeltaNet):
        inputs = _stack([w.mixer[f"in_proj_{name}"] for name in ("qkv", "z", "b", "a")])
    else:
        inputs = _stack([w.mixer[f"{name}_proj"] for name in ("q", "k", "v")])
    return StepLayer(w, inputs, _stack([w.ffn["router"], w.ffn["shared_gate"]]))


def _output(layer: StepLayer) -> AffineMatrix:
    found = layer.w.mixer["out_proj" if layer.delta else "o_proj"]
    assert isinstance(found, AffineMatrix)
    return found


def _stack(parts: Sequence[AffineMatrix]) -> AffineMatrix:
    """By rows, filled up with zeros to a multiple of FILL."""
    first, rows = parts[0], sum(part.rows for part in parts)

    def join(name: str) -> Tensor:
        tensors = [getattr(part, name) for part in parts]
        fill = torch.zeros(-rows % FILL, tensors[0].shape[1], dtype=tensors[0].dtype, device=tensors[0].device)
        return torch.cat([*tensors, fill])

    return AffineMatrix(join("codes"), join("scales"), join("biases"), first.bits, first.group)


def refusal(layers: Sequence[LayerWeights], ends: Ends) -> str | None:
    """Why these layers have no fast step, or None."""
    hidden = len(ends.final_norm)
    if hidden & (hidden - 1) or hidden < 256:
        return f"a hidden size of {hidden}: the step wants a power of two"
    if ends.head.rows % FILL or any(n % FILL for w in layers for n in _widths(w.spec.mixer)[:2]):
        return f"a vocabulary of {ends.head.rows} or a delta net whose widths are no multiples of {FILL}"
    for i, w in enumerate(layers):
        mixer, ffn = w.spec.mixer, w.spec.ffn
        if not isinstance(ffn, Moe) or ffn.router.kind != "softmax" or not ffn.router.normalize or not ffn.shared_gated:
            return f"layer {i}: the step wants softmax routing with normalised weights and a gated shared expert"
        if not isinstance(mixer, Attention | DeltaNet) or (isinstance(mixer, DeltaNet) and mixer.fused):
            return f"layer {i}: the step has no {type(mixer).__name__} of this kind"
        if any(role.endswith(".bias") for role in w.mixer):
            return f"layer {i}: the step has no biases"
        for role, m in {**w.mixer, **w.ffn}.items():
            bits = 8 if role in ("router", "shared_gate") else 4
            if not isinstance(m, torch.Tensor) and (not isinstance(m, AffineMatrix) or (m.bits, m.group) != (bits, 64)):
                return f"layer {i}: {role} is not of {bits} bits in groups of 64"
    return None


def _widths(spec: Any) -> tuple[int, int, int]:
    """Rows of the joined input projections: through the convolution, gates of the output, heads of the two last."""
    if isinstance(spec, DeltaNet):
        return spec.channels, spec.n_value_heads * spec.value_dim, spec.n_value_heads
    return 0, 0, 0


def _decoded_row(table: AffineMatrix, row: int) -> Tensor:
    """scale * code + bias of one row of 4-bit codes, one multiplication and one addition, as `ops.embed`."""
    shifts = torch.arange(0, 32, 4, device=table.codes.device, dtype=torch.int32)
    codes = ((table.codes[row][:, None] >> shifts) & 15).reshape(table.groups, -1).to(torch.float32)
    return (codes * table.scales[row].to(torch.float32)[:, None] + table.biases[row].to(torch.float32)[:, None]).reshape(-1)


def _squares(h: Tensor) -> Tensor:
    """Sums of squares over 16 neighbours, neighbours first, as kernels/step.py sums them."""
    x = (h * h).reshape(-1, SQUARES)
    while x.shape[1] > 1:
        x = x[:, 0::2] + x[:, 1::2]
    return x[:, 0]


def _log(n: int) -> int:
    return max(0, (n - 1).bit_length())
