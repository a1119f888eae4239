"""The phases of a decoded token in CUDA C++ (source/step.cu), for one model's sizes. The same bits as kernels/step.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moeflux.backends.cuda.compiler import HOPPER, KernelCache, Program
from moeflux.backends.cuda.device import Device
from moeflux.backends.cuda.launcher import ConvolutionArgument, KeptArgument, Module, matrix, normed
from moeflux.backends.cuda.memory import Tensor
from moeflux.backends.cuda.pool import ExpertPool
from moeflux.backends.cuda.step_weights import Ends, StepLayer, output_matrix, pack_tiles, widths
from moeflux.backends.state import BLOCK
from moeflux.models.spec import Attention, DeltaNet, Moe

if TYPE_CHECKING:
    from moeflux.backends.cuda.phases import Buffers, DecodeOptions

TILE_BYTES = 2048  # codes of 16 rows of 256 inputs, as in source/tile.cuh
TILE_ROWS = 16
SLICE = 256  # inputs of one warp
SIDES = 2  # tiles that a block of the input projection multiplies at a time
HEAD_TILES = 4  # of one block of the head
EARLY = 16  # phases that let the next one start before their own wait: bits 1 project, 2 delta, 4 output, 8 route, 16 down
STATIC_BYTES = 16384  # shared memory that kernels take beside their tiles, at most


@dataclass(frozen=True)
class Limits:
    """Of a GPU: what decides how much of a matrix one block takes."""

    processors: int
    shared_bytes: int

    @classmethod
    def of(cls, device: Device) -> Limits:
        found: Any = torch.cuda.get_device_properties(device.name)
        return cls(int(found.multi_processor_count), int(found.shared_memory_per_block_optin))


def no_compiled_step(layers: Sequence[StepLayer], ends: Ends, pool: ExpertPool) -> str | None:
    """Why these layers have no step in CUDA C++, or None. What has no step at all is refused before."""
    hidden, width = pool.shape.hidden, pool.shape.width
    mixers, moes = {layer.w.spec.mixer for layer in layers}, {layer.w.spec.ffn for layer in layers}
    if sum(isinstance(m, DeltaNet) for m in mixers) > 1 or len({output_matrix(y).cols for y in layers if not y.delta}) > 1:
        return "layers with different sizes"
    if len(moes) > 1:
        return "layers with different experts"
    (moe,) = moes
    assert isinstance(moe, Moe)
    if hidden % SLICE or hidden > 4096 or width % SLICE or any(output_matrix(y).cols % SLICE for y in layers):
        return f"sizes that are no multiples of {SLICE}"
    if any(output_matrix(y).cols > 8192 for y in layers) or moe.shared_width != width:
        return "sizes that no block holds"
    n, k = moe.router.n_experts, moe.router.k
    warps = (k + 1) * width // SLICE
    if (n > 32 and n % 32) or n > min(hidden // 8, warps * 32) or k > min(n, 32) or warps > 32:
        return f"{k} of {n} experts of width {width}"
    for m in mixers:
        if isinstance(m, Attention) and (reason := _no_attention(m)):
            return reason
        if isinstance(m, DeltaNet) and (m.conv_width != 4 or m.value_dim % 64 or m.key_dim not in (64, 128, 256)):
            return "delta heads of other sizes"
    return None


def _no_attention(m: Attention) -> str | None:
    half, each = m.rope.dim // 2, m.head_dim // 32
    if m.head_dim not in (64, 128, 256) or m.n_heads // m.n_kv_heads > 8:
        return f"{m.n_heads} heads of {m.head_dim} channels in {m.n_kv_heads} groups"
    if m.rope.pairing != "half" or half & (half - 1) or half < each:
        return f"a rotation of {m.rope.dim} channels"
    return None


def step_sizes(layers: Sequence[StepLayer], pool: ExpertPool, limits: Limits, pdl: bool) -> dict[str, int]:
    """The macros of source/step.cu."""
    moe = layers[0].w.spec.ffn
    assert isinstance(moe, Moe)
    hidden = pool.shape.hidden
    found = {
        "HIDDEN": hidden, "WIDTH": pool.shape.width, "K": moe.router.k, "EXPERTS": moe.router.n_experts,
        "CHANNELS": 0, "GATES": 0, "HEADS": 0, "KEY_HEADS": 1, "DK": 64, "DV": 64, "ATTENTION": 0, "SIDES": SIDES,
        "PROJECT_DELTA_TILES": 1, "PROJECT_FULL_TILES": 1, "HEAD_TILES": HEAD_TILES, "PDL": int(pdl), "EARLY": EARLY,
        "KV_HEADS": 1, "RATIO": 1, "HEAD_DIM": 64, "HALF": 16, "Q_STRIDE": 64, "ROWS_BLOCK": BLOCK,
    }  # fmt: skip
    for layer in layers:
        spec = layer.w.spec.mixer
        tiles = _project_tiles(layer.inputs.rows // TILE_ROWS, hidden, limits)
        if isinstance(spec, DeltaNet):
            channels, gates, heads = widths(spec)
            found |= {"CHANNELS": channels, "GATES": gates, "HEADS": heads, "KEY_HEADS": spec.n_key_heads}
            found |= {"DK": spec.key_dim, "DV": spec.value_dim, "PROJECT_DELTA_TILES": tiles}
        elif isinstance(spec, Attention):
            found |= {"ATTENTION": output_matrix(layer).cols, "PROJECT_FULL_TILES": tiles, "KV_HEADS": spec.n_kv_heads}
            found |= {"RATIO": spec.n_heads // spec.n_kv_heads, "HEAD_DIM": spec.head_dim, "HALF": spec.rope.dim // 2}
            found |= {"Q_STRIDE": spec.head_dim * (2 if spec.gated else 1)}
    return found


def scale_bytes(n: int) -> int:
    """Shared memory for scales and biases of 16 rows of n inputs, as in source/tile.cuh."""
    return TILE_ROWS * (n // 16 + (16 if n > SLICE else 0))


def _project_tiles(n_tiles: int, hidden: int, limits: Limits) -> int:
    """For each block, so that every multiprocessor has one; less where shared memory or threads do not suffice."""
    slices = hidden // SLICE
    room = (limits.shared_bytes - STATIC_BYTES) // (slices * TILE_BYTES + scale_bytes(hidden)) // SIDES * SIDES
    return max(1, min(-(-n_tiles // limits.processors), room, slices * SIDES * 2))


class CompiledStep:
    """Launches. Raises a DeviceError where the kernels cannot be compiled or loaded."""

    def __init__(
        self,
        device: Device,
        layers: Sequence[StepLayer],
        ends: Ends,
        pool: ExpertPool,
        buffers: Buffers,
        options: DecodeOptions,
        cache: KernelCache | None = None,
    ) -> None:
        self._pdl = options.pdl and device.capability >= HOPPER
        self._buffers, self._ends, self._pool, self._eps = buffers, ends, pool, options.eps
        sizes = step_sizes(layers, pool, Limits.of(device), self._pdl)
        module = Module((cache or KernelCache()).load(Program.of("step.cu", device.capability, sizes)))
        self._sizes = sizes
        self._inputs, self._head_tiles = [pack_tiles(layer.inputs) for layer in layers], pack_tiles(ends.head)
        slices, inner = sizes["HIDDEN"] // SLICE, (sizes["K"] + 1) * sizes["WIDTH"] // SLICE

        def room(tiles: int, inputs: int) -> int:
            return tiles * (inputs // SLICE * TILE_BYTES + scale_bytes(inputs))

        def rounds(tiles: int) -> int:
            return room(-(-tiles // SIDES) * SIDES, sizes["HIDDEN"])

        if sizes["HEADS"]:
            n = sizes["GATES"] // SLICE
            self._project_delta = module.kernel("project_delta", slices * SIDES * 32, rounds(sizes["PROJECT_DELTA_TILES"]))
            self._delta = module.kernel("delta", 256)
            self._output_delta = module.kernel("output_delta", n * 32, room(1, sizes["GATES"]))
        if sizes["ATTENTION"]:
            n = sizes["ATTENTION"] // SLICE
            self._project_full = module.kernel("project_full", slices * SIDES * 32, rounds(sizes["PROJECT_FULL_TILES"]))
            self._attend = module.kernel("attend", 12 * 32, 2 * 32 * (sizes["HEAD_DIM"] * 2 + 16))
            self._join = module.kernel("join", 64)
            self._output_full = module.kernel("output_full", n * 32, room(1, sizes["ATTENTION"]))
        self._route = module.kernel("route", slices * 64, room(2, sizes["HIDDEN"]))
        self._gate_up = module.kernel("gate_up", slices * 64, room(4, sizes["HIDDEN"]))
        self._down = module.kernel("down", inner * 32, room(sizes["K"] + 1, sizes["WIDTH"]))
        self._head = module.kernel("head", slices * 32, room(sizes["HEAD_TILES"], sizes["HIDDEN"]))
        self._next = module.kernel("next", 1024)

    def project(self, i: int, layer: StepLayer) -> None:
        b, w, m, sizes = self._buffers, layer.inputs, layer.w.mixer, self._sizes
        n_tiles, into = w.rows // TILE_ROWS, normed(b.hidden, b.squares, layer.w.mixer_norm, self._eps)
        if not layer.delta:
            blocks = -(-n_tiles // sizes["PROJECT_FULL_TILES"])
            self._project_full(blocks, self._inputs[i], n_tiles, into, b.inputs, pdl=self._pdl)
            return
        places = (t.data_ptr() for t in (b.hidden, b.places[i, 0], m["conv1d"], m["A_log"], m["dt_bias"]))
        blocks = -(-n_tiles // sizes["PROJECT_DELTA_TILES"])
        self._project_delta(blocks, self._inputs[i], n_tiles, into, ConvolutionArgument(*places), b.inputs, pdl=self._pdl)

    def mix(self, i: int, layer: StepLayer, angles: tuple[Tensor, Tensor]) -> None:
        b, spec = self._buffers, layer.w.spec.mixer
        if isinstance(spec, Attention):
            self._mix_attention(i, layer, spec, angles)
            return
        assert isinstance(spec, DeltaNet)
        self._delta(
            spec.n_value_heads * spec.value_dim // 32, b.inputs, b.hidden, b.places[i, 1], layer.w.mixer["norm"],
            float(spec.key_dim**-0.5), b.mixed, b.sizes, pdl=self._pdl,
        )  # fmt: skip

    def _mix_attention(self, i: int, layer: StepLayer, spec: Attention, angles: tuple[Tensor, Tensor]) -> None:
        b, m = self._buffers, layer.w.mixer
        kept = KeptArgument(*(x.data_ptr() for x in (b.rows_base, b.places[i, 0], b.places[i, 1])))
        self._attend(
            spec.n_kv_heads * b.n_chunks, b.inputs, m["q_norm"], m["k_norm"], self._eps, *angles, kept, b.parts, b.position,
            float(spec.head_dim**-0.5), b.n_chunks, pdl=self._pdl,
        )  # fmt: skip
        stride = spec.head_dim * (2 if spec.gated else 1)
        self._join(
            spec.n_heads * spec.head_dim // 64, b.parts, b.inputs, b.position, b.n_chunks, int(spec.gated), stride,
            spec.head_dim, b.mixed, pdl=self._pdl,
        )  # fmt: skip

    def output(self, layer: StepLayer) -> None:
        b, w = self._buffers, output_matrix(layer)
        blocks = w.rows // TILE_ROWS
        if layer.delta:
            self._output_delta(blocks, matrix(w), b.mixed, b.sizes, self._eps, b.hidden, b.squares, pdl=self._pdl)
        else:
            self._output_full(blocks, matrix(w), b.mixed, b.hidden, b.squares, pdl=self._pdl)

    def route(self, layer: StepLayer) -> None:
        b, f, moe = self._buffers, layer.w.ffn, layer.w.spec.ffn
        assert isinstance(moe, Moe)
        routers, gate, up = layer.router.rows // TILE_ROWS, f["shared_gate_proj"], f["shared_up_proj"]
        self._route(
            routers + gate.rows // TILE_ROWS, matrix(layer.router), routers, matrix(gate), matrix(up),
            normed(b.hidden, b.squares, layer.w.ffn_norm, self._eps), b.router, b.inner[moe.router.k * moe.width :],
            pdl=self._pdl,
        )  # fmt: skip

    def gate_up(self, i: int, layer: StepLayer) -> None:
        b, pool, k = self._buffers, self._pool, self._sizes["K"]
        self._gate_up(
            k * pool.shape.width // 32, pool.words, pool.table[i], b.router,
            normed(b.hidden, b.squares, layer.w.ffn_norm, self._eps), b.inner, pdl=self._pdl,
        )  # fmt: skip

    def down(self, i: int, layer: StepLayer) -> None:
        b, pool, moe = self._buffers, self._pool, layer.w.spec.ffn
        assert isinstance(moe, Moe)
        self._down(
            pool.shape.hidden // TILE_ROWS, pool.words, pool.table[i], matrix(layer.w.ffn["shared_down_proj"]), b.router,
            b.inner, float(moe.router.scale), b.hidden, b.squares, pdl=self._pdl,
        )  # fmt: skip

    def finish(self) -> None:
        b, ends = self._buffers, self._ends
        n = ends.head.rows // (TILE_ROWS * self._sizes["HEAD_TILES"])
        into = normed(b.hidden, b.squares, ends.final_norm, self._eps)
        self._head(n, self._head_tiles, into, b.logits, b.best, b.index, pdl=self._pdl)
        self._next(
            1, b.best, b.index, n, matrix(ends.embedding), b.hidden, b.squares, b.position, b.tokens, len(b.tokens),
            pdl=self._pdl,
        )  # fmt: skip
