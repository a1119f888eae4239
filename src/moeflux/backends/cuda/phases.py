"""The phases of one decoded token as kernel launches over fixed memory: what a graph captures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moeflux.backends.cuda.device import Device
from moeflux.backends.cuda.kernels import decode_attention, step
from moeflux.backends.cuda.memory import Tensor
from moeflux.backends.cuda.pool import ExpertPool
from moeflux.backends.cuda.step_weights import Ends, StepLayer, output_matrix, widths
from moeflux.backends.state import BLOCK
from moeflux.models.spec import Attention, DeltaNet, Moe

SQUARES = 16  # neighbours whose squares are summed by whoever writes them, as in kernels/step.py
CHUNK = 32  # positions of one attention program, as in kernels/mixers.py
HEAD_PROGRAMS = 396  # three for each multiprocessor of an H100 or H200


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
    """`context`: positions at most. `graph`: replay one graph per token. `pdl`: phases overlap at their edges."""

    context: int
    eps: float
    graph: bool = True
    pdl: bool = True
    tiles: Tiles = Tiles()


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
        b, eps, w, spec = self.buffers, self._options.eps, layer.inputs, layer.w.spec.mixer
        groups, log, tiles = self._hidden // 64, _log(self._hidden), self._options.tiles
        m = layer.w.mixer
        taps, a_log, dt = (m[n] if layer.delta else b.hidden for n in ("conv1d", "A_log", "dt_bias"))
        channels, gates, heads = widths(spec)
        if mask & 1:
            tile = tiles.project
            step.project_kernel[(-(-w.rows // tile.rows),)](
                w.codes, w.scales, w.biases, b.hidden, b.squares, layer.w.mixer_norm, eps, b.inputs, b.hidden,
                b.places[i, 0], taps, a_log, dt, channels, gates, heads, groups, log, tile.rows, layer.delta,
                **self._flags(), **self._how(tile),
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
        b, eps, f, pool, spec = self.buffers, self._options.eps, layer.w.ffn, self._pool, layer.w.spec.ffn
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
            if pool.fetch is not None:
                pool.fetch(i, b.router)
            step.gate_up_kernel[(k * spec.width // tiles.gate_up.rows,)](
                pool.words, pool.scales, pool.table[i], b.router, b.hidden, b.squares, norm, eps, b.inner,
                pool.shape.slot_words, k, experts, spec.width, groups, log, tiles.gate_up.rows, **self._flags(),
                **self._how(tiles.gate_up),
            )  # fmt: skip
        if mask & 32:
            step.down_kernel[(self._hidden // tiles.down.rows,)](
                pool.words, pool.scales, pool.table[i], down.codes, down.scales, down.biases, b.router, b.inner, b.hidden,
                b.squares, spec.router.scale, pool.shape.slot_words, k, experts, spec.width, groups, tiles.down.rows,
                **self._flags(), **self._how(tiles.down),
            )  # fmt: skip

    def enter(self, token: int, position: int) -> None:
        """As if the last step had chosen this token: its embedding, and the position that it stands at."""
        b = self.buffers
        b.entered[0], b.entered[1] = token, position - 1
        b.chosen.copy_(b.entered, non_blocking=True)
        b.position.copy_(b.chosen[1:])
        self._next(b.certain, b.chosen, 1)

    def _finish(self) -> None:
        b, ends, eps = self.buffers, self._ends, self._options.eps
        head, n = ends.head, len(b.best)
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
