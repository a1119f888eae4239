"""The phases of one decoded token as kernel launches over fixed memory: what a graph captures.

Each phase has a kernel in Triton (kernels/step.py) and one in CUDA C++ (compiled_step.py), which take the same memory and
give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moeflux.backends.cuda.compiled_step import TILE_ROWS, CompiledStep, no_compiled_step
from moeflux.backends.cuda.compiler import HOPPER
from moeflux.backends.cuda.device import Device
from moeflux.backends.cuda.kernels import decode_attention, step
from moeflux.backends.cuda.memory import Tensor
from moeflux.backends.cuda.pool import ExpertPool
from moeflux.backends.cuda.step_weights import Ends, StepLayer, output_matrix, widths
from moeflux.backends.state import BLOCK
from moeflux.core.errors import DeviceError
from moeflux.core.log import log
from moeflux.models.spec import Attention, DeltaNet, Moe

SQUARES = 16  # neighbours whose squares are summed by whoever writes them, as in kernels/step.py
SIZES = 4  # readings of the delta rule whose squares are summed by whoever writes them
CHUNK = 32  # positions of one attention program, as in kernels/mixers.py
HEAD_PROGRAMS = 396  # three for each multiprocessor of an H100 or H200
PHASES = {"project": 1, "mix": 2, "output": 4, "route": 8, "gate_up": 16, "down": 32, "head": 64}


@dataclass(frozen=True)
class Tile:
    """Rows of a matrix that one program computes, and its warps. Changes no bit."""

    rows: int = 16
    warps: int = 8


@dataclass(frozen=True)
class Tiles:
    """Chosen on an H200."""

    project: Tile = Tile(64, 8)
    delta: Tile = Tile(8, 2)
    attend: Tile = Tile(0, 4)
    output: Tile = Tile(32, 8)
    route: Tile = Tile(16, 8)
    gate_up: Tile = Tile(16, 8)
    down: Tile = Tile(16, 4)
    head: Tile = Tile(32, 8)


@dataclass(frozen=True)
class DecodeOptions:
    """`context`: positions at most. `graph`: replay one graph per token. `pdl`: phases overlap at their edges, where the GPU
    can do that (Hopper on). `kernels`: "auto" takes CUDA C++ where it can be had. `triton`: phases that stay in Triton.
    None of them changes a bit."""

    context: int
    eps: float
    graph: bool = True
    pdl: bool = True
    tiles: Tiles = Tiles()
    kernels: Literal["auto", "cuda", "triton"] = "auto"
    triton: frozenset[str] = frozenset()


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
        self.mixed = new(max(output_matrix(layer).cols for layer in layers))
        self.sizes = new(len(self.mixed) // SIZES)
        self.router = new(max(layer.router.rows for layer in layers))
        self.inner = new(moe.router.k * moe.width + moe.shared_width)
        self.parts = new(size)
        self.logits = new(ends.head.rows)
        n = min(HEAD_PROGRAMS, ends.head.rows // options.tiles.head.rows)
        self.n_best = n
        n = max(n, ends.head.rows // TILE_ROWS)
        self.best, self.index = new(n), new(n, dtype=torch.int32)
        self.position = new(1, dtype=torch.int32)
        self.places = new(len(layers), 2, -(-options.context // BLOCK) + 1, dtype=torch.int64)
        self.rows_base = new(8, dtype=torch.bfloat16)
        tokens = torch.zeros(max(16, options.context), dtype=torch.int32)
        self.tokens = tokens.pin_memory() if device.dp4a else tokens  # the device writes into host memory
        entered = torch.zeros(2, dtype=torch.int32)
        self.entered = entered.pin_memory() if device.dp4a else entered  # a token that the host chose, and where it stands
        self.chosen, self.certain = new(2, dtype=torch.int32), new(1)

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """What one step leaves for the next."""
        return self.hidden, self.squares, self.position, self.tokens


class Phases:
    """Launches. Which tiles are used, and whether phases overlap, changes no bit."""

    def __init__(
        self,
        device: Device,
        layers: Sequence[StepLayer],
        ends: Ends,
        pool: ExpertPool,
        angles: tuple[Tensor, Tensor],
        options: DecodeOptions,
    ) -> None:
        self._device, self._layers, self._ends, self._pool, self._options = device, layers, ends, pool, options
        self._hidden = len(ends.final_norm)
        self._cos, self._sin = angles
        self.buffers = Buffers(device, layers, ends, options)
        self.compiled = self._compile()
        self._fast = 0 if self.compiled is None else sum(bit for name, bit in PHASES.items() if name not in options.triton)

    def _compile(self) -> CompiledStep | None:
        """The kernels in CUDA C++; None where "auto" falls back to Triton, which is said."""
        options, wanted = self._options, self._options.kernels == "cuda"
        if options.kernels == "triton" or (self._device.name == "cpu" and not wanted):
            return None
        try:
            if self._device.name == "cpu":
                raise DeviceError("kernels in CUDA C++ need a GPU", where="option 'kernels'", hint="use kernels='triton'")
            if reason := no_compiled_step(self._layers, self._ends, self._pool):
                raise DeviceError(f"no decode step in CUDA C++ for {reason}", where="option 'kernels'")
            return CompiledStep(self._device, self._layers, self._ends, self._pool, self.buffers, options)
        except DeviceError as error:
            if wanted:
                raise
            log.warning("decoding uses the slower Triton kernels: %s", error)
            return None

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
        return self._options.pdl and self._device.dp4a and self._device.capability >= HOPPER

    def _how(self, tile: Tile) -> dict[str, Any]:
        how: dict[str, Any] = {"num_warps": tile.warps, "enable_fp_fusion": False}
        return how | {"launch_pdl": True} if self._pdl else how

    def _mix(self, i: int, layer: StepLayer, mask: int) -> None:
        fast, compiled = self._fast, self.compiled
        if mask & 1:
            if compiled and fast & 1:
                compiled.project(i, layer)
            else:
                self._project(i, layer)
        if mask & 2:
            if compiled and fast & 2:
                compiled.mix(i, layer, (self._cos, self._sin))
            elif not layer.delta:
                self._attend(i, layer)
            else:
                self._delta(i, layer)
        if mask & 4:
            if compiled and fast & 4:
                compiled.output(layer)
            else:
                self._output(layer)

    def _project(self, i: int, layer: StepLayer) -> None:
        b, w, m, tile = self.buffers, layer.inputs, layer.w.mixer, self._options.tiles.project
        taps, a_log, dt = (m[n] if layer.delta else b.hidden for n in ("conv1d", "A_log", "dt_bias"))
        channels, gates, heads = widths(layer.w.spec.mixer)
        step.project_kernel[(-(-w.rows // tile.rows),)](
            w.codes, w.scales, w.biases, b.hidden, b.squares, layer.w.mixer_norm, self._options.eps, b.inputs, b.hidden,
            b.places[i, 0], taps, a_log, dt, channels, gates, heads, self._hidden // 64, _log(self._hidden), tile.rows,
            layer.delta, **self._flags(), **self._how(tile),
        )  # fmt: skip

    def _delta(self, i: int, layer: StepLayer) -> None:
        b, spec, tile = self.buffers, layer.w.spec.mixer, self._options.tiles.delta
        assert isinstance(spec, DeltaNet)
        channels, gates, heads = widths(spec)
        step.delta_kernel[(heads * spec.value_dim // tile.rows,)](
            b.inputs, b.hidden, b.places[i, 1], layer.w.mixer["norm"], b.mixed, b.sizes, spec.n_key_heads,
            heads // spec.n_key_heads, channels, gates, heads, spec.key_dim**-0.5, spec.value_dim, tile.rows,
            _log(spec.key_dim), PDL=self._pdl, **self._how(tile),
        )  # fmt: skip

    def _output(self, layer: StepLayer) -> None:
        b, spec, out, tile = self.buffers, layer.w.spec.mixer, output_matrix(layer), self._options.tiles.output
        heads, log = (spec.n_value_heads, _log(spec.value_dim)) if isinstance(spec, DeltaNet) else (1, 0)
        step.output_kernel[(out.rows // tile.rows,)](
            out.codes, out.scales, out.biases, b.mixed, b.sizes, self._options.eps, b.hidden, b.squares, out.groups, heads,
            log, tile.rows, layer.delta, **self._flags(), **self._how(tile),
        )  # fmt: skip

    def _attend(self, i: int, layer: StepLayer) -> None:
        b, spec, m = self.buffers, layer.w.spec.mixer, layer.w.mixer
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
        fast, compiled = self._fast, self.compiled
        if mask & 8:
            if compiled and fast & 8:
                compiled.route(layer)
            else:
                self._route(layer)
        if mask & 16:
            if self._pool.fetch is not None:
                self._pool.fetch(i, self.buffers.router)
            if compiled and fast & 16:
                compiled.gate_up(i, layer)
            else:
                self._gate_up(i, layer)
        if mask & 32:
            if compiled and fast & 32:
                compiled.down(i, layer)
            else:
                self._down(i, layer)

    def _route(self, layer: StepLayer) -> None:
        b, f, r, spec, tile = self.buffers, layer.w.ffn, layer.router, layer.w.spec.ffn, self._options.tiles.route
        assert isinstance(spec, Moe)
        gate, up, routers = f["shared_gate_proj"], f["shared_up_proj"], r.rows // tile.rows
        step.route_kernel[(routers + gate.rows // tile.rows,)](
            r.codes, r.scales, r.biases, gate.codes, gate.scales, gate.biases, up.codes, up.scales, up.biases, b.hidden,
            b.squares, layer.w.ffn_norm, self._options.eps, b.router, b.inner[spec.router.k * spec.width :], routers,
            self._hidden // 64, _log(self._hidden), tile.rows, **self._flags(), **self._how(tile),
        )  # fmt: skip

    def _gate_up(self, i: int, layer: StepLayer) -> None:
        b, pool, spec, tile = self.buffers, self._pool, layer.w.spec.ffn, self._options.tiles.gate_up
        assert isinstance(spec, Moe)
        k = spec.router.k
        step.gate_up_kernel[(k * spec.width // tile.rows,)](
            pool.words, pool.scales, pool.table[i], b.router, b.hidden, b.squares, layer.w.ffn_norm, self._options.eps,
            b.inner, pool.shape.slot_words, k, spec.router.n_experts, spec.width, self._hidden // 64, _log(self._hidden),
            tile.rows, **self._flags(), **self._how(tile),
        )  # fmt: skip

    def _down(self, i: int, layer: StepLayer) -> None:
        b, pool, spec, tile = self.buffers, self._pool, layer.w.spec.ffn, self._options.tiles.down
        assert isinstance(spec, Moe)
        down = layer.w.ffn["shared_down_proj"]
        step.down_kernel[(self._hidden // tile.rows,)](
            pool.words, pool.scales, pool.table[i], down.codes, down.scales, down.biases, b.router, b.inner, b.hidden,
            b.squares, spec.router.scale, pool.shape.slot_words, spec.router.k, spec.router.n_experts, spec.width,
            self._hidden // 64, tile.rows, **self._flags(), **self._how(tile),
        )  # fmt: skip

    def enter(self, token: int, position: int) -> None:
        """As if the last step had chosen this token: its embedding, and the position that it stands at."""
        b = self.buffers
        b.entered[0], b.entered[1] = token, position - 1
        b.chosen.copy_(b.entered, non_blocking=True)
        b.position.copy_(b.chosen[1:])
        self._next(b.certain, b.chosen, 1)

    def _finish(self) -> None:
        if self.compiled and self._fast & 64:
            self.compiled.finish()
            return
        b, ends, eps = self.buffers, self._ends, self._options.eps
        head, n = ends.head, b.n_best
        tile = self._options.tiles.head
        step.head_kernel[(n,)](
            head.codes, head.scales, head.biases, b.hidden, b.squares, ends.final_norm, eps, b.logits, b.best, b.index,
            head.rows, self._hidden // 64, _log(self._hidden), tile.rows, 3, **self._flags(), **self._how(tile),
        )  # fmt: skip
        self._next(b.best, b.index, n)

    def _next(self, best: Tensor, index: Tensor, n: int) -> None:
        b, table = self.buffers, self._ends.embedding
        step.next_kernel[(1,)](
            best, index, n, table.codes, table.scales, table.biases, b.hidden, b.squares, b.position, b.tokens,
            len(b.tokens), max(2, 1 << _log(n)), self._hidden, PDL=self._pdl, **self._how(Tile()),
        )  # fmt: skip


def _log(n: int) -> int:
    return max(0, (n - 1).bit_length())
