"""A chunk of a prompt through all layers, with every expert in device memory: few launches, in CUDA C++ (source/prompt.cu).

The bits are those of the composed blocks, which the tests hold it against; attention itself is theirs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from moeflux.backends.cuda.compiled_step import Limits, no_compiled_step, step_sizes
from moeflux.backends.cuda.compiler import KernelCache, Program
from moeflux.backends.cuda.launcher import Module, matrix
from moeflux.backends.cuda.memory import AffineMatrix, Tensor
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.cuda.pool import ExpertPool
from moeflux.backends.cuda.step_weights import Ends, StepLayer, join_rows, output_matrix
from moeflux.backends.ops import Span
from moeflux.backends.state import DeltaState, LayerState
from moeflux.core.errors import DeviceError
from moeflux.models.spec import Attention, DeltaNet, Moe

MODEL = ("HIDDEN", "WIDTH", "K", "EXPERTS", "CHANNELS", "GATES", "HEADS", "KEY_HEADS", "DK", "DV", "ATTENTION")
STRIPS = {4: 256, 8: 128}  # rows of a matrix that one block takes, by bits, as in source/many.cuh
TOKENS = 64  # tokens of a block
RUN = 16  # tokens of one warp in the convolution


def _stage_bytes(bits: int) -> int:
    return TOKENS * 576 + 4 * TOKENS * 8 + STRIPS[bits] // 16 * (16 * (bits * 32 + 32) + 256)


class WorkArgument(ctypes.Structure):
    """`Work` of source/many.cuh."""

    _fields_ = (
        ("edges", ctypes.c_void_p), ("token", ctypes.c_void_p), ("experts", ctypes.c_int), ("rows", ctypes.c_int),
        ("strips", ctypes.c_int),
    )  # fmt: skip


class ActivationsArgument(ctypes.Structure):
    """`Activations` of source/many.cuh."""

    _fields_ = (("digits", ctypes.c_void_p), ("groups", ctypes.c_void_p))


class Digits:
    """Rows of activations as integers."""

    def __init__(self, rows: int, cols: int, device: str) -> None:
        self.digits = torch.empty(rows, 2 * cols, dtype=torch.int8, device=device)
        self.groups = torch.empty(rows, cols // 64, 2, device=device)

    def argument(self, first: int = 0) -> ActivationsArgument:
        return ActivationsArgument(self.digits[first:].data_ptr(), self.groups[first:].data_ptr())


class Chunk:
    """Memory for chunks of one length."""

    def __init__(self, n: int, sizes: dict[str, int], widest: int, device: str) -> None:
        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        k, hidden, width = sizes["K"], sizes["HIDDEN"], sizes["WIDTH"]
        self.n = n
        self.inputs = new(n * widest)
        self.hidden = Digits(n, hidden, device)
        self.mixed = Digits(n, max(sizes["GATES"], sizes["ATTENTION"]), device)
        self.logits = new(n, -(-(sizes["EXPERTS"] + 1) // 32) * 32)
        self.pairs, self.inner = new(n * (k + 1), 2 * width), Digits(n * (k + 1), width, device)
        self.outputs, self.shared = new(n * k, hidden), new(n, hidden)
        self.ids, self.place, self.whose = (new(n * k, dtype=torch.int32) for _ in range(3))
        self.weights = new(n * k)
        self.counts = new(sizes["EXPERTS"], dtype=torch.int32)
        self.edges = new(sizes["EXPERTS"] + 1, dtype=torch.int32)
        self.all = torch.tensor([0, n], dtype=torch.int32, device=device)
        if sizes["HEADS"]:
            keys, heads = sizes["KEY_HEADS"], sizes["HEADS"]
            self.q, self.k = new(n, keys, sizes["DK"]), new(n, keys, sizes["DK"])
            self.v, self.o = new(n, heads, sizes["DV"]), new(n, heads, sizes["DV"])
            self.product, self.decay, self.beta = new(n, keys), new(n, heads), new(n, heads)


class PromptStep:
    """Raises a DeviceError where these layers have no such step or its kernels cannot be had."""

    def __init__(
        self,
        ops: CudaOps,
        layers: Sequence[StepLayer],
        ends: Ends,
        pool: ExpertPool,
        eps: float,
        cache: KernelCache | None = None,
    ) -> None:
        if reason := no_compiled_step(layers, ends, pool):
            raise DeviceError(f"no prompt step in CUDA C++ for {reason}", where="backend 'cuda'")
        self._ops, self._layers, self._ends, self._pool, self._eps = ops, layers, ends, pool, eps
        limits = Limits.of(ops.device)
        sizes = step_sizes(layers, pool, limits, False)
        sizes = {name: value for name, value in sizes.items() if name in MODEL}
        self._widest = max(layer.inputs.rows for layer in layers)
        sizes["BLOCK_TOKENS"] = TOKENS
        sizes["INPUTS"] = max((layer.inputs.rows for layer in layers if layer.delta), default=1)
        if 2 * max(map(_stage_bytes, STRIPS)) > limits.shared_bytes - 4096 or sizes["WIDTH"] % STRIPS[4]:
            raise DeviceError("no prompt step in CUDA C++: too little shared memory a block", where="backend 'cuda'")
        self._sizes, self._blocks = sizes, limits.processors
        module = Module((cache or KernelCache()).load(Program.of("prompt.cu", ops.device.capability, sizes)))
        self._kernels = {name: module.kernel(name, *how) for name, how in _kernels(sizes).items()}
        self._pairs = [join_rows([y.w.ffn["shared_gate_proj"], y.w.ffn["shared_up_proj"]]) for y in layers]
        self._chunk: Chunk | None = None
        self._broken = torch.zeros(1, dtype=torch.int32, device=ops.device.name)

    def run(self, tokens: Sequence[int], states: Sequence[LayerState], position: int) -> Tensor:
        """Hidden rows [T, hidden] behind the last layer; the states move on. `check` says whether all was finite."""
        n = len(tokens)
        if self._chunk is None or self._chunk.n != n:
            self._chunk = None  # its memory first
            self._chunk = Chunk(n, self._sizes, self._widest, self._ops.device.name)
        x: Tensor = self._ops.embed(self._ends.embedding, tokens)
        for i, (layer, state) in enumerate(zip(self._layers, states, strict=True)):
            self._mix(layer, self._chunk, x, Span(0, n, position, state))
            self._feed(i, layer, self._chunk, x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Of some of the rows that `run` gave."""
        found: Tensor = self._ops.head(x, self._ends.final_norm, self._ends.head, self._eps)
        return found

    def check(self) -> None:
        """Raises where a router met what is not finite. Waits for the device."""
        broken = bool(self._broken.item())
        self._broken.zero_()
        if broken:
            self._ops.refuse_scores()

    def _dense(self, name: str, w: AffineMatrix, x: ActivationsArgument, n: int, before: Tensor | None, y: Tensor) -> None:
        c = self._chunk
        assert c is not None
        strips = -(-w.rows // STRIPS[w.bits])
        work = WorkArgument(c.all.data_ptr(), 0, 1, w.rows, strips)
        blocks = min(self._blocks, strips * -(-n // TOKENS))
        added = ctypes.c_void_p(0) if before is None else before
        self._kernels[name](blocks, matrix(w), work, x, added, y)

    def _mix(self, layer: StepLayer, c: Chunk, x: Tensor, span: Span) -> None:
        n, w, digits, groups = c.n, layer.inputs, c.hidden.digits, c.hidden.groups
        self._kernels["norm_digits"](n, x, layer.w.mixer_norm, self._eps, digits, groups)
        self._dense("from_hidden", w, c.hidden.argument(), n, None, c.inputs)
        inputs = c.inputs[: n * w.rows].view(n, w.rows)
        if layer.delta:
            self._mix_delta(layer, c, inputs, span.state)
        else:
            self._mix_attention(layer, c, inputs, span)
        name = "from_delta" if layer.delta else "from_attention"
        self._dense(name, output_matrix(layer), c.mixed.argument(), n, x, x)

    def _mix_delta(self, layer: StepLayer, c: Chunk, inputs: Tensor, state: DeltaState) -> None:
        m, n, spec = layer.w.mixer, c.n, layer.w.spec.mixer
        assert isinstance(spec, DeltaNet)
        jobs = (spec.n_key_heads + spec.n_value_heads + 1) * -(-n // RUN)
        self._kernels["mix_many"](
            -(-jobs // 4), inputs, state.conv, m["conv1d"], m["A_log"], m["dt_bias"], float(spec.key_dim**-0.5), n, c.q, c.k,
            c.v, c.product, c.decay, c.beta,
        )  # fmt: skip
        kept, channels = len(state.conv), spec.channels
        last = inputs[-kept:, :channels] if n >= kept else torch.cat([state.conv[n:], inputs[:, :channels]])
        state.conv.copy_(last)
        self._kernels["delta_many"](
            spec.n_value_heads * spec.value_dim // 32, c.q, c.k, c.v, c.decay, c.beta, c.product, n, state.delta, c.o
        )
        self._kernels["gated_digits"](n, c.o, m["norm"], inputs, self._eps, c.mixed.digits, c.mixed.groups)

    def _mix_attention(self, layer: StepLayer, c: Chunk, inputs: Tensor, span: Span) -> None:
        ops, m, n, spec = self._ops, layer.w.mixer, c.n, layer.w.spec.mixer
        assert isinstance(spec, Attention)
        stride, dim = spec.head_dim * (2 if spec.gated else 1), spec.head_dim
        queries, keys = spec.n_heads * stride, spec.n_kv_heads * dim
        q = inputs[:, :queries].view(n, spec.n_heads, stride)[:, :, :dim]
        k, v = (inputs[:, at : at + keys].reshape(n, spec.n_kv_heads, dim) for at in (queries, queries + keys))
        q, k = ops.rms_norm(q, m["q_norm"], self._eps), ops.rms_norm(k, m["k_norm"], self._eps)
        mixed = ops._attend_span(q, k, v, spec, span)
        self._kernels["attended_digits"](
            n, mixed, inputs, int(spec.gated), dim, inputs.shape[1], c.mixed.digits, c.mixed.groups
        )

    def _feed(self, i: int, layer: StepLayer, c: Chunk, x: Tensor) -> None:
        n, kernels, pool, moe, sizes = c.n, self._kernels, self._pool, layer.w.spec.ffn, self._sizes
        assert isinstance(moe, Moe)
        k, hidden, width, experts, rows = moe.router.k, sizes["HIDDEN"], sizes["WIDTH"], sizes["EXPERTS"], layer.router.rows
        kernels["norm_digits"](n, x, layer.w.ffn_norm, self._eps, c.hidden.digits, c.hidden.groups)
        self._dense("route_many", layer.router, c.hidden.argument(), n, None, c.logits)
        self._dense("from_hidden", self._pairs[i], c.hidden.argument(), n, None, c.pairs[n * k :])
        c.counts.zero_()
        kernels["choose_many"](
            -(-n // 8), c.logits, n, rows, float(moe.router.scale), c.ids, c.weights, c.place, c.counts, self._broken
        )
        kernels["edge_many"](1, c.counts, c.edges)
        kernels["spread_many"](-(-n * k // 256), c.ids, c.edges, c.place, c.whose, n * k)
        table = pool.table[i]
        work = WorkArgument(c.edges.data_ptr(), c.whose.data_ptr(), experts, 2 * width, 2 * width // STRIPS[4])
        kernels["gate_up_many"](self._blocks, pool.words, table, work, c.hidden.argument(), c.pairs)
        kernels["inner_digits"](n * (k + 1), c.pairs, c.inner.digits, c.inner.groups)
        work = WorkArgument(c.edges.data_ptr(), 0, experts, hidden, -(-hidden // STRIPS[4]))
        kernels["down_many"](self._blocks, pool.words, table, work, c.inner.argument(), c.outputs)
        self._dense("from_width", layer.w.ffn["shared_down_proj"], c.inner.argument(n * k), n, None, c.shared)
        kernels["combine_many"](n, c.outputs, c.place, c.weights, c.shared, c.logits, rows, x)


def _kernels(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Threads and dynamic shared memory of each kernel."""
    many = (512, 2 * _stage_bytes(4))
    found: dict[str, tuple[int, ...]] = {
        "from_hidden": many, "from_width": many, "gate_up_many": many, "down_many": many,
        "route_many": (256, 2 * _stage_bytes(8)), "norm_digits": (sizes["HIDDEN"] // 8,),
        "inner_digits": (sizes["WIDTH"] // 8,), "choose_many": (256,), "edge_many": (32,), "spread_many": (256,),
        "combine_many": (sizes["HIDDEN"] // 4,),
    }  # fmt: skip
    if sizes["HEADS"]:
        found |= {
            "from_delta": many,
            "mix_many": (128,),
            "delta_many": (256,),
            "gated_digits": (sizes["GATES"] // 8,),
        }
    if sizes["ATTENTION"]:
        found |= {"from_attention": many, "attended_digits": (sizes["ATTENTION"] // 8,)}
    return found
