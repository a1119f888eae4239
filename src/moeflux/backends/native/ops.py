"""The native CPU backend: arrays are numpy float32, weights stay coded, every block is a few native calls.

Activations are rounded to int8 per group before a product with affine weights; `exact` keeps them in float32, for tests
against the reference. Bits do not depend on threads, on how a prompt is cut or on company: see native/kernels.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import moeflux._native as _native
from moeflux.backends.native.arena import Arena
from moeflux.backends.native.layer import fuse_layer, rotation
from moeflux.backends.numerics import library_mark
from moeflux.backends.numpy.ops import NumpyOps
from moeflux.backends.numpy.storage import HostStorage
from moeflux.backends.ops import Arrivals, Handle, LayerWeights, Span, Weights
from moeflux.backends.rope import mla_scale
from moeflux.backends.state import DeltaState, KvState, LatentState
from moeflux.core.config import Hints, Kv
from moeflux.core.errors import FormatError, NumericError
from moeflux.formats.quant import Affine, BlockFp8, Codec, Matrix, Plain, broken_part
from moeflux.models.spec import Attention, DeltaNet, Mla, Router

F32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class NativeOps(NumpyOps):
    """Primitives that have no kernel of their own are numpy's; no block of the four families uses them."""

    name = "native"

    def __init__(self, threads: int, isa: str = "auto", *, exact: bool = False, poison: bool = False) -> None:
        """`exact`: float32 activations. `poison`: scratch memory is filled with NaN before each use."""
        self._machine = _native.Machine(threads=threads, isa=isa, exact=exact, poison=poison)
        self._poison = poison
        self._exact = exact
        self._arena = Arena(self.allocate)

    @property
    def threads(self) -> int:
        return self._machine.threads

    @property
    def isa(self) -> str:
        return self._machine.isa

    @property
    def numerics(self) -> str:
        """All instruction sets take the same steps in the same order; only those without fused multiply-add round twice."""
        rounding = "generic" if self.isa == "generic" else "fma"
        return f"native-{rounding}{'-exact' if self._exact else ''}-{library_mark()}"

    @property
    def native_seconds(self) -> float:
        """Time spent inside native calls so far."""
        return self._machine.seconds

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory that runs so far asked for at most."""
        return self._machine.scratch_bytes

    def time_read(self, buffer: Bytes) -> float:
        """Seconds that all threads together take to read a buffer once."""
        return self._machine.time_read(buffer)

    def multiply_rate(self) -> float:
        """Integer multiply-adds per second of all threads together, from registers alone."""
        return self._machine.multiply_rate()

    # Weights and memory.

    def allocate(self, n_bytes: int) -> Bytes:
        return _native.Block(n_bytes).bytes()

    def storage(self, kv: Kv) -> HostStorage:
        return HostStorage(kv, self._poison)

    def place(self, n_bytes: int) -> Bytes:
        return self._arena.carve(n_bytes)

    def load_vector(self, values: F32) -> F32:
        return np.array(values, dtype=np.float32, order="C")

    def load_matrix(self, matrix: Matrix) -> _native.Matrix:
        if part := broken_part(matrix):
            hint = "the file is damaged; download it again"
            raise FormatError(f"{part} holds NaN or infinity", where=matrix.source, hint=hint)
        return _wrap(self.resident(matrix))

    def load_embedding(self, matrix: Matrix) -> _native.Matrix:
        return self.load_matrix(matrix)

    def load_heads(self, matrix: Matrix) -> _native.Heads:
        heads, rows, _ = matrix.shape
        return _native.heads(self.load_matrix(matrix), heads, 0, rows, False)

    def load_kv_b(self, matrix: Matrix, spec: Mla) -> tuple[_native.Heads, _native.Heads]:
        stored = self.load_matrix(matrix)
        embed_q = _native.heads(stored, spec.n_heads, 0, spec.nope_dim, True)
        return embed_q, _native.heads(stored, spec.n_heads, spec.nope_dim, spec.value_dim, False)

    def new_bank(self, n_experts: int) -> _native.Bank:
        return _native.Bank(n_experts)

    def put_expert(self, bank: _native.Bank, expert: int, matrices: Mapping[str, Matrix]) -> None:
        bank.put(expert, *(_wrap(matrices[name]) for name in ("gate", "up", "down")))

    def resident(self, matrix: Matrix) -> Matrix:
        """The components in memory of our own, on huge pages where they are large. Those that were read there stay."""
        parts = {}
        for name, part in matrix.parts.items():
            if self._arena.holds(part):
                parts[name] = part
                continue
            copy = self._arena.carve(part.nbytes).view(part.dtype).reshape(part.shape)
            copy[...] = part
            parts[name] = copy
        return Matrix(matrix.codec, matrix.shape, parts, matrix.source)

    def _empty(self, *shape: int) -> F32:
        y = np.empty(shape, dtype=np.float32)
        if self._poison:
            y.fill(np.nan)
        return y

    # Primitives.

    def embed(self, table: _native.Matrix, ids: Sequence[int]) -> F32:
        y = self._empty(len(ids), table.cols)
        self._machine.embed(table, np.asarray(ids, dtype=np.int64), y)
        return y

    def linear(self, x: F32, weight: _native.Matrix) -> F32:
        y = self._empty(len(x), weight.rows)
        self._machine.linears(np.ascontiguousarray(x), (weight,), (y,))
        return y

    def _linears(self, x: F32, w: Weights, roles: Sequence[str]) -> list[F32]:
        """Several products with the same input, as one piece of work."""
        matrices = tuple([w[role] for role in roles])
        outputs = [self._empty(len(x), m.rows) for m in matrices]
        self._machine.linears(x, matrices, tuple(outputs))
        for role, y in zip(roles, outputs, strict=True):
            if f"{role}.bias" in w:
                y += w[f"{role}.bias"]
        return outputs

    def head_linear(self, x: F32, weight: _native.Heads) -> F32:
        y = self._empty(len(x), x.shape[1], weight.n_out)
        self._machine.head_linear(np.ascontiguousarray(x), weight, y)
        return y

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        y = self._empty(*x.shape)
        self._machine.rms_norm(np.ascontiguousarray(x), weight, eps, y)
        return y

    def add_norm(self, x: F32, y: F32, weight: F32, eps: float) -> tuple[F32, F32]:
        total, normed = self._empty(*x.shape), self._empty(*x.shape)
        self._machine.add_norm(x, y, weight, eps, total, normed)
        return total, normed

    def route(self, logits: F32, bias: F32 | None, router: Router) -> tuple[Ints, F32]:
        ids = np.empty((len(logits), router.k), dtype=np.int64)
        weights = self._empty(len(logits), router.k)
        scores = logits.copy()  # the machine turns logits into scores in place
        shape = (router.k, router.n_groups, router.top_groups, router.normalize, router.scale)
        if not self._machine.route(scores, bias, *shape, ids, weights):
            raise _not_finite()
        return ids, weights

    def experts(self, x: F32, ids: Ints, weights: F32, arrivals: Arrivals) -> F32:
        outputs = self._empty(*ids.shape, x.shape[-1])  # [T, k, hidden]
        for bank, experts in arrivals:
            self._machine.experts_some(x, ids, bank, np.asarray(experts, dtype=np.int64), outputs)
        y = self._empty(*x.shape)
        self._machine.combine(outputs, weights, y)
        return y

    # All layers in one native call, where nothing is recorded.

    def fuse(self, layer: LayerWeights, eps: float) -> _native.Layer | None:
        return fuse_layer(layer, eps)

    def open_stream(self, store: Handle, hints: Hints, k: int) -> _native.Stream:
        previous, lookahead = hints in ("previous", "both"), hints in ("lookahead", "both")
        return _native.Stream(store, self._machine, previous, lookahead, k)

    def run_layers(
        self,
        layers: Sequence[LayerWeights],
        x: F32,
        spans: Callable[[int], Sequence[Span]],
        stream: _native.Stream,
        cancel: _native.CancelFlag | None = None,
        head: tuple[F32, float, _native.Matrix, Sequence[int]] | None = None,
    ) -> F32 | None:
        """All layers in place, with experts from the stream. `head`: its norm, eps and matrix, and the rows of x whose
        logits are wanted, which are then returned. `cancel` ends the run with CancelledError."""
        fused = [layer.fused for layer in layers]
        states = [[_state(span) for span in spans(i)] for i in range(len(layers))]
        logits = last = None
        if head is not None:
            norm, eps, matrix, rows = head
            logits = self._empty(len(rows), matrix.rows)
            last = (norm, eps, matrix, np.asarray(rows, dtype=np.int64), self._empty(len(rows), x.shape[1]), logits)
        broken = self._machine.run_layers(fused, x, states, stream, cancel, last)
        if broken >= 0:
            raise _not_finite(f"layer {broken}")
        return logits

    # Blocks.

    def mlp(self, x: F32, w: Weights, prefix: str = "") -> F32:
        return self._mlp(x, w, prefix, None)

    def shared_expert(self, x: F32, w: Weights) -> F32:
        return self._mlp(x, w, "shared_", w.get("shared_gate"))

    def _mlp(self, x: F32, w: Weights, prefix: str, gate: Handle | None) -> F32:
        y = self._empty(*x.shape)
        parts = (w[f"{prefix}gate_proj"], w[f"{prefix}up_proj"], w[f"{prefix}down_proj"])
        self._machine.mlp(np.ascontiguousarray(x), *parts, gate, y)
        return y

    def attention(self, x: F32, w: Weights, spec: Attention, spans: Sequence[Span], eps: float) -> F32:
        q, k, v = self._linears(x, w, ("q_proj", "k_proj", "v_proj"))
        states = [_state(span) for span in spans]
        mixed = self._empty(len(x), spec.n_heads * spec.head_dim)
        shape = (spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.gated)
        self._machine.attention(q, k, v, w["q_norm"], w["k_norm"], eps, *shape, rotation(spec.rope), states, mixed)
        return self._linears(mixed, w, ("o_proj",))[0]

    def latent_attention(self, x: F32, w: Weights, spec: Mla, spans: Sequence[Span]) -> F32:
        if spec.q_rank is None:
            q, kv = self._linears(x, w, ("q_proj", "kv_a_proj"))
        else:
            low, kv = self._linears(x, w, ("q_a_proj", "kv_a_proj"))
            (q,) = self._linears(self.rms_norm(low, w["q_a_norm"], spec.norm_eps), w, ("q_b_proj",))
        q = q.reshape(len(x), spec.n_heads, -1)
        q_latent = self.head_linear(q[:, :, : spec.nope_dim], w["embed_q"])
        states = [_state(span) for span in spans]
        mixed = self._empty(len(x), spec.n_heads, spec.kv_rank)
        scale, turn = mla_scale(spec), rotation(spec.rope)
        self._machine.latent_attention(
            q_latent, q, spec.nope_dim, kv, w["kv_a_norm"], spec.norm_eps, scale, turn, states, mixed
        )
        values = self.head_linear(mixed, w["unembed_out"])
        return self._linears(values.reshape(len(x), -1), w, ("o_proj",))[0]

    def delta_net(self, x: F32, w: Weights, spec: DeltaNet, spans: Sequence[Span], eps: float) -> F32:
        qkv, z, b, a = (np.ascontiguousarray(part) for part in self._delta_inputs(x, w, spec))
        states = [_state(span) for span in spans]
        mixed = self._empty(len(x), spec.n_value_heads * spec.value_dim)
        shape = (spec.n_key_heads, spec.n_value_heads, spec.key_dim, spec.value_dim)
        gates = (w["conv1d"], w["A_log"], w["dt_bias"], w["norm"])
        self._machine.delta_net(qkv, z, a, b, *gates, eps, *shape, states, mixed)
        return self.linear(mixed, w["out_proj"])

    def _delta_inputs(self, x: F32, w: Weights, spec: DeltaNet) -> tuple[F32, F32, F32, F32]:
        if spec.fused:
            return super()._delta_inputs(x, w, spec)
        qkv, z, b, a = self._linears(x, w, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
        return qkv, z, b, a


def _not_finite(where: str | None = None) -> NumericError:
    hint = "a weight of this layer or before is broken"
    return NumericError("the router's scores are not finite", where=where, hint=hint)


def _state(span: Span) -> tuple[Any, ...]:
    """What a native layer needs of a span: rows, position, state and kind. Rows are grown for the new tokens and given
    as the addresses of their blocks, with the bytes of an element; arrays as they are."""
    state, n = span.state, span.stop - span.start
    rows = (span.start, span.stop, span.position)
    match state:
        case KvState(keys=keys, values=values):
            keys.extend(n)
            values.extend(n)
            return (*rows, keys.table, values.table, keys.storage.element_bytes, span.decodes)
        case LatentState(latents=latents):
            latents.extend(n)
            return (*rows, latents.table, latents.table, latents.storage.element_bytes, span.decodes)
        case DeltaState():
            return (*rows, state.conv, state.delta, span.decodes)
    raise TypeError(type(state))


def available_isas() -> tuple[str, ...]:
    """Instruction sets whose kernels run on this machine, best first."""
    return tuple(_native.instruction_sets())


def _wrap(matrix: Matrix) -> _native.Matrix:
    """A native matrix that looks into the parts' memory; leading dimensions become rows."""
    *lead, cols = matrix.shape
    rows = int(np.prod(lead))
    parts = {name: part.view(np.uint8).reshape(-1) for name, part in matrix.parts.items()}
    try:
        return _native_matrix(matrix.codec, rows, cols, parts)
    except FormatError as error:
        error.where = matrix.source
        raise


def _native_matrix(codec: Codec, rows: int, cols: int, parts: Mapping[str, Bytes]) -> _native.Matrix:
    match codec:
        case Plain(dtype):
            return _native.plain_matrix(rows, cols, dtype, parts["weight"])
        case Affine(bits, group, scales):
            return _native.affine_matrix(rows, cols, bits, group, scales, parts["weight"], parts["scales"], parts["biases"])
        case BlockFp8(block, scales):
            return _native.fp8_matrix(rows, cols, block[0], scales, parts["weight"], parts["scale_inv"])
