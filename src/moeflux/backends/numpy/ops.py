"""Primitives in numpy.

Every matrix product is taken token by token, so that a row's bits never depend on its company: a BLAS library sums
in another order for another number of rows. That is slow and on purpose; the native backend is the fast one.
Weights are decoded to float32 when they are loaded, experts when they are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moeflux.backends.numerics import library_mark, numpy_mark
from moeflux.backends.numpy.storage import HostStorage
from moeflux.backends.ops import Arrivals, Handle, Ops
from moeflux.backends.rope import frequencies, rotation_scale
from moeflux.backends.state import DeltaState
from moeflux.core.config import Kv
from moeflux.core.errors import FormatError, NumericError
from moeflux.formats.quant import BlockFp8, Matrix, broken_part, decode
from moeflux.models.spec import Mla, Rope, Router

F32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class NumpyOps(Ops):
    name = "numpy"

    @property
    def numerics(self) -> str:
        return f"numpy-{numpy_mark()}-{library_mark()}"

    def zeros(self, shape: tuple[int, ...]) -> F32:
        return np.zeros(shape, dtype=np.float32)

    def storage(self, kv: Kv) -> HostStorage:
        return HostStorage(kv)

    def load_vector(self, values: F32) -> F32:
        return np.array(values, dtype=np.float32)

    def load_matrix(self, matrix: Matrix) -> Handle:
        return np.array(_decode_finite(matrix))  # a copy even where nothing was decoded: the caller may use its arrays again

    def load_embedding(self, matrix: Matrix) -> Handle:
        """Kept coded: one row per token is all that is ever decoded."""
        parts = {name: np.array(part) for name, part in matrix.parts.items()}
        return Matrix(matrix.codec, matrix.shape, parts, matrix.source)

    def load_heads(self, matrix: Matrix) -> Handle:
        return self.load_matrix(matrix)

    def load_kv_b(self, matrix: Matrix, spec: Mla) -> tuple[Handle, Handle]:
        heads = _decode_finite(matrix).reshape(spec.n_heads, spec.nope_dim + spec.value_dim, spec.kv_rank)
        embed_q = np.ascontiguousarray(heads[:, : spec.nope_dim].transpose(0, 2, 1))
        return embed_q, np.ascontiguousarray(heads[:, spec.nope_dim :])

    def place(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        return np.empty(n_bytes, dtype=np.uint8)

    def allocate(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        return np.empty(n_bytes, dtype=np.uint8)

    def new_bank(self, n_experts: int) -> Handle:
        return {}

    def put_expert(self, bank: Handle, expert: int, matrices: Mapping[str, Matrix]) -> None:
        """Kept coded, decoded when used."""
        bank[expert] = matrices

    def to_numpy(self, x: F32) -> F32:
        return x

    def embed(self, table: Handle, ids: Sequence[int]) -> F32:
        if isinstance(table.codec, BlockFp8):
            return np.asarray(_decode_finite(table)[np.asarray(ids)])
        return _decode_finite(table.rows(np.asarray(ids, dtype=np.int64)))

    def linear(self, x: F32, weight: Handle) -> F32:
        return np.stack([weight @ row for row in np.ascontiguousarray(x)])

    def head_linear(self, x: F32, weight: Handle) -> F32:
        return np.stack([np.matmul(weight, row[:, :, None])[:, :, 0] for row in x])

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        x = np.ascontiguousarray(x)
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(mean + np.float32(eps)) * weight, dtype=np.float32)

    def l2_norm(self, x: F32) -> F32:
        x = np.ascontiguousarray(x)
        return np.asarray(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + np.float32(1e-6)), dtype=np.float32)

    def silu(self, x: F32) -> F32:
        return x * self.sigmoid(x)

    def sigmoid(self, x: F32) -> F32:
        small = np.exp(-np.abs(x))  # never overflows
        return np.asarray(np.where(x >= 0, np.float32(1), small) / (np.float32(1) + small), dtype=np.float32)

    def rotate(self, x: F32, rope: Rope, position: int) -> F32:
        angles = np.arange(position, position + len(x))[:, None] * frequencies(rope)  # [T, dim/2], float64
        scale = rotation_scale(rope)
        cos = (np.cos(angles) * scale).astype(np.float32)[:, None]
        sin = (np.sin(angles) * scale).astype(np.float32)[:, None]
        y = np.empty_like(x)
        half = rope.dim // 2
        a, b = (slice(half), slice(half, None)) if rope.pairing == "half" else (slice(0, None, 2), slice(1, None, 2))
        y[..., a] = x[..., a] * cos - x[..., b] * sin
        y[..., b] = x[..., b] * cos + x[..., a] * sin
        return y

    def attend(self, q: F32, keys: F32, values: F32, position: int, scale: float) -> F32:
        groups = keys.shape[1]
        grouped = q.reshape(len(q), groups, -1, q.shape[-1])  # [T, G, H/G, D]
        out = []
        for t, query in enumerate(grouped):
            seen = position + t + 1
            scores = query @ keys[:seen].transpose(1, 2, 0) * np.float32(scale)  # [G, H/G, seen]
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            share = scores / scores.sum(axis=-1, keepdims=True)
            out.append((share @ values[:seen].transpose(1, 0, 2)).reshape(q.shape[1], -1))
        return np.stack(out)

    def convolve(self, x: F32, weight: F32, state: DeltaState) -> F32:
        inputs = np.concatenate([state.conv, x])  # [width - 1 + T, C]
        width = weight.shape[1]
        state.conv[:] = inputs[len(x) :]
        y = inputs[: len(x)] * weight[:, 0]
        for tap in range(1, width):
            y += inputs[tap : tap + len(x)] * weight[:, tap]
        return y

    def delta_gates(self, a: F32, b: F32, a_log: F32, dt_bias: F32) -> tuple[F32, F32]:
        softplus = np.logaddexp(np.float32(0), a + dt_bias)  # stable for any argument
        return np.exp(-np.exp(a_log) * softplus), self.sigmoid(b)

    def delta_rule(self, q: F32, k: F32, v: F32, decay: F32, beta: F32, state: DeltaState) -> F32:
        ratio = v.shape[1] // q.shape[1]
        q, k = q.repeat(ratio, axis=1), k.repeat(ratio, axis=1)  # consecutive value heads share a key head
        s = state.delta  # [Hv, dk, dv]
        out = np.empty_like(v)
        for t in range(len(v)):
            s *= decay[t][:, None, None]
            read = np.matmul(k[t][:, None, :], s)[:, 0]
            change = (v[t] - read) * beta[t][:, None]
            s += k[t][:, :, None] * change[:, None, :]
            out[t] = np.matmul(q[t][:, None, :], s)[:, 0]
        return out

    def join(self, parts: Sequence[F32], axis: int) -> F32:
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)

    def route(self, logits: F32, bias: F32 | None, router: Router) -> tuple[Ints, F32]:
        if not np.isfinite(logits).all():
            raise NumericError("the router's scores are not finite", hint="a weight of this layer or before is broken")
        if router.kind == "softmax":
            scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
            scores = chosen_by = scores / scores.sum(axis=-1, keepdims=True)
        else:
            assert bias is not None
            scores = self.sigmoid(logits)
            chosen_by = _best_groups(scores + bias, router)
        ids = _top(chosen_by, router.k)
        weights = np.take_along_axis(scores, ids, axis=-1)
        if router.normalize:
            tiny = np.float32(1e-20) if router.kind == "noaux_tc" else np.float32(0)
            weights = weights / (weights.sum(axis=-1, keepdims=True) + tiny)
        return ids, np.asarray(weights * np.float32(router.scale), dtype=np.float32)

    def experts(self, x: F32, ids: Ints, weights: F32, arrivals: Arrivals) -> F32:
        outputs = np.zeros((*ids.shape, x.shape[-1]), dtype=np.float32)  # [T, k, hidden]
        for bank, experts in arrivals:
            for expert in experts:
                tokens, ranks = np.nonzero(ids == expert)
                m = {name: _decode_finite(matrix) for name, matrix in bank[expert].items()}
                inner = self.silu(self.linear(x[tokens], m["gate"])) * self.linear(x[tokens], m["up"])
                outputs[tokens, ranks] = self.linear(inner, m["down"])
        total = np.zeros_like(x)
        for rank in range(ids.shape[1]):
            total += weights[:, rank, None] * outputs[:, rank]
        return total


def _decode_finite(matrix: Matrix) -> F32:
    values = decode(matrix)
    if not np.isfinite(values).all():
        raise FormatError(
            f"{broken_part(matrix) or 'the product of code and scale'} holds NaN or infinity",
            where=matrix.source,
            hint="the file is damaged; download it again",
        )
    return values


def _top(scores: F32, k: int) -> Ints:
    """Indices of the k largest, ordered by (score descending, index ascending)."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def _best_groups(scores: F32, router: Router) -> F32:
    """Scores with every expert outside the best groups at minus infinity. A group counts its two best experts."""
    grouped = scores.reshape(len(scores), router.n_groups, -1)
    two_best = np.sort(grouped, axis=-1)[:, :, -2:].sum(axis=-1)
    kept = np.zeros(two_best.shape, dtype=bool)
    np.put_along_axis(kept, _top(two_best, router.top_groups), True, axis=-1)
    masked: Any = np.where(kept[:, :, None], grouped, np.float32(-np.inf))
    return np.asarray(masked.reshape(scores.shape), dtype=np.float32)
