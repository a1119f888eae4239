"""Primitives on one GPU: arrays are torch tensors in float32, weights stay coded.

Every kernel sums in an order of its own that does not depend on how many rows there are (kernels/arith.py); torch is used
for memory and for arithmetic on single elements. So a row's bits are the same alone and in company.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from moeflux.backends.account import StateAccount
from moeflux.backends.cuda.device import Device
from moeflux.backends.cuda.kernels import floats, mixers, rows
from moeflux.backends.cuda.memory import AffineMatrix, DeviceDeltaState, DeviceStorage, FloatMatrix, Handle, Tensor, Uploader
from moeflux.backends.cuda.pool import ExpertPool
from moeflux.backends.cuda.products import Products
from moeflux.backends.numerics import library_mark
from moeflux.backends.ops import Arrivals, Ops, Span
from moeflux.backends.rope import frequencies, rotation_scale
from moeflux.backends.state import DeltaState, KvState, LayerState
from moeflux.core.config import Kv
from moeflux.core.errors import DeviceError, NumericError
from moeflux.formats.quant import BlockFp8, Matrix
from moeflux.models.spec import Attention, DeltaNet, Mixer, Mla, Rope, Router

F32 = npt.NDArray[np.float32]
Bank = dict[int, Mapping[str, Matrix]]

EXACT = {"enable_fp_fusion": False}  # a product and a sum are rounded each, unless a kernel says `fma`


class CudaOps(Ops):
    name = "cuda"

    def __init__(self, device: Device, *, poison: bool = False) -> None:
        """`poison`: fresh memory is filled with NaN, for tests."""
        self.device = device
        self._poison = poison
        self._up = Uploader(device)
        self._products = Products(device, self._empty)
        self._angles: dict[Rope, tuple[Tensor, Tensor]] = {}
        self.defer_checks = (
            False  # True: `route` does not wait for the device, and `check` must be called before results are used
        )
        self._broken: Tensor | None = None  # whether a router met what is not finite, where nobody has looked yet
        self.attend_tile = (16, 4)  # rows of one program, at most 32, and its warps; changes no bit
        self.delta_tile = (8, 1)  # columns of a head's matrix in one program, and its warps; changes no bit

    # Weights and memory.

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, device=self.device.name)

    def _empty(self, *shape: int) -> Tensor:
        y = torch.empty(shape, device=self.device.name)
        return y.fill_(float("nan")) if self._poison else y

    def storage(self, kv: Kv) -> DeviceStorage:
        return DeviceStorage(kv, self.device, self._poison)

    @property
    def numerics(self) -> str:
        device = f"{self.device.title}-{self.device.capability[0]}.{self.device.capability[1]}"
        return f"cuda-{device}-triton-{triton.__version__}-{library_mark()}"

    def new_state(self, spec: Mixer, kv: Kv, account: StateAccount) -> LayerState:
        if isinstance(spec, DeltaNet):
            shape = (spec.n_value_heads, spec.key_dim, spec.value_dim)
            return DeviceDeltaState.empty((spec.conv_width - 1, spec.channels), shape, self.device, account)
        return super().new_state(spec, kv, account)

    def load_vector(self, values: F32) -> Tensor:
        return self._up.tensor(np.asarray(values, dtype=np.float32))

    def load_matrix(self, matrix: Matrix) -> Handle:
        return self._up.matrix(matrix)

    def load_embedding(self, matrix: Matrix) -> Handle:
        if isinstance(matrix.codec, BlockFp8):
            return self._up.heads(self._up.decoded(matrix)[None])
        return self._up.matrix(matrix)

    def load_heads(self, matrix: Matrix) -> FloatMatrix:
        return self._up.heads(self._up.decoded(matrix))

    def load_kv_b(self, matrix: Matrix, spec: Mla) -> tuple[FloatMatrix, FloatMatrix]:
        heads = self._up.decoded(matrix).reshape(spec.n_heads, spec.nope_dim + spec.value_dim, spec.kv_rank)
        embed_q = np.ascontiguousarray(heads[:, : spec.nope_dim].transpose(0, 2, 1))
        return self._up.heads(embed_q), self._up.heads(np.ascontiguousarray(heads[:, spec.nope_dim :]))

    def place(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """Host memory: a weight is read here and then copied."""
        return np.empty(n_bytes, dtype=np.uint8)

    def allocate(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        return np.empty(n_bytes, dtype=np.uint8)

    def new_bank(self, n_experts: int) -> Bank:
        return {}

    def put_expert(self, bank: Bank, expert: int, matrices: Mapping[str, Matrix]) -> None:
        """Still in host memory: copied when it is used."""
        bank[expert] = matrices

    def to_numpy(self, x: Tensor | npt.NDArray[Any]) -> npt.NDArray[Any]:
        return x.cpu().numpy() if isinstance(x, torch.Tensor) else x

    def tensor(self, x: Tensor | npt.NDArray[Any]) -> Tensor:
        return self._tensor(x)

    def _tensor(self, x: Tensor | npt.NDArray[Any]) -> Tensor:
        return x if isinstance(x, torch.Tensor) else self._up.tensor(np.asarray(x), "rows")

    # Products.

    def embed(self, table: Handle, ids: Sequence[int]) -> Tensor:
        chosen = self._up.tensor(np.asarray(ids, dtype=np.int64), "token ids")
        if isinstance(table, FloatMatrix):
            return table.weight[0][chosen].to(torch.float32)
        y = self._empty(len(chosen), table.cols)
        block = 256
        floats.affine_rows_kernel[(len(chosen), triton.cdiv(table.cols, block))](
            table.codes, table.scales, table.biases, chosen, y, table.cols, table.group, table.bits, block, **EXACT
        )
        return y

    def linear(self, x: Tensor, weight: Handle) -> Tensor:
        x = self._tensor(x)
        if isinstance(weight, AffineMatrix):
            return self._products.affine(x.contiguous(), weight)
        return self._products.floats(x[:, None], weight)[:, 0]

    def head_linear(self, x: Tensor, weight: FloatMatrix) -> Tensor:
        return self._products.floats(x, weight)

    # Rows.

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, weight, eps, True)

    def l2_norm(self, x: Tensor) -> Tensor:
        return self._norm(x, x, 1e-6, False)

    def _norm(self, x: Tensor, weight: Tensor, eps: float, mean: bool) -> Tensor:
        x = self._tensor(x).contiguous()
        y, dim = self._empty(*x.shape), x.shape[-1]
        rows.norm_kernel[(x.numel() // dim,)](x, weight, y, dim, 1 / dim, eps, _log(dim), mean, num_warps=4, **EXACT)
        return y

    def gated_norm(self, x: Tensor, weight: Tensor, z: Tensor, eps: float) -> Tensor:
        x, z, dim = x.contiguous(), z.contiguous(), x.shape[-1]
        y = self._empty(*x.shape)
        rows.gated_norm_kernel[(x.numel() // dim,)](x, weight, z, y, dim, 1 / dim, eps, _log(dim), num_warps=1, **EXACT)
        return y

    def silu(self, x: Tensor) -> Tensor:
        return self._map(x, True)

    def sigmoid(self, x: Tensor) -> Tensor:
        return self._map(x, False)

    def _map(self, x: Tensor, silu: bool) -> Tensor:
        x = x.contiguous()
        y, block = self._empty(*x.shape), 1024
        rows.map_kernel[(triton.cdiv(x.numel(), block),)](x, y, x.numel(), silu, block, **EXACT)
        return y

    def rotate(self, x: Tensor, rope: Rope, position: int) -> Tensor:
        x = x.contiguous()
        cos, sin = (table[position:] for table in self.angles(rope, position + len(x)))
        y, heads, paired = self._empty(*x.shape), x.shape[1], rope.pairing == "interleaved"
        grid = (len(x) * heads,)
        rows.rotate_kernel[grid](
            x, cos, sin, y, heads, rope.dim, rope.dim // 2, 1 << _log(rope.dim // 2), paired, num_warps=1, **EXACT
        )
        return y

    def angles(self, rope: Rope, n: int) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, dim / 2] of at least n positions, computed in float64 and rounded once."""
        found = self._angles.get(rope)
        if found is None or len(found[0]) < n:
            angles = np.arange(max(4096, 1 << _log(n)))[:, None] * frequencies(rope)
            tables = ((f(angles) * rotation_scale(rope)).astype(np.float32) for f in (np.cos, np.sin))
            cos, sin = (self._up.tensor(table, "angles") for table in tables)
            found = self._angles[rope] = (cos, sin)
        return found

    def join(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=axis)

    # Mixers.

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, position: int, scale: float) -> Tensor:
        n, heads, dim = q.shape
        groups, value_dim = keys.shape[1], values.shape[2]
        q, ratio = q.contiguous(), heads // groups
        out = self._empty(n, heads, value_dim)
        tall, warps = self.attend_tile if n * ratio > 16 else (16, 4)
        grid = (triton.cdiv(n * ratio, tall), groups)
        mixers.attend_kernel[grid](
            q, keys, values, out, n * ratio, position, scale, keys.stride(0), values.stride(0), keys.stride(1),
            values.stride(1), groups, ratio, dim, value_dim, max(16, 1 << _log(dim)), max(16, 1 << _log(value_dim)),
            keys.dtype == torch.bfloat16, tall, num_warps=warps, **EXACT,
        )  # fmt: skip
        return out

    def _attend_span(self, q: Tensor, k: Tensor, v: Tensor, spec: Attention, span: Span) -> Tensor:
        """Rows that are kept in bf16 go to the tensor cores as they are."""
        state: KvState = span.state
        state.keys.append(self._rotate_first(k[span.rows], spec.rope, span.position))
        state.values.append(v[span.rows])
        rotated = self._rotate_first(q[span.rows], spec.rope, span.position)
        keys, values = (torch.cat(rows.parts()) for rows in (state.keys, state.values))
        return self.attend(rotated, keys, values, span.position, spec.head_dim**-0.5)

    def convolve(self, x: Tensor, weight: Tensor, state: DeltaState) -> Tensor:
        inputs, n = torch.cat([state.conv, x]), len(x)  # [width - 1 + T, C]
        state.conv.copy_(inputs[n:])
        y = inputs[:n] * weight[:, 0]
        for tap in range(1, weight.shape[1]):
            y = y + inputs[tap : tap + n] * weight[:, tap]
        return y

    def delta_gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        a, b = a.contiguous(), b.contiguous()
        decay, beta, heads = self._empty(*a.shape), self._empty(*a.shape), a.shape[1]
        rows.gates_kernel[(len(a),)](a, b, a_log, dt_bias, decay, beta, heads, 1 << _log(heads), num_warps=1, **EXACT)
        return decay, beta

    def delta_rule(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: DeltaState) -> Tensor:
        q, k, v, decay, beta = (part.contiguous() for part in (q, k, v, decay, beta))
        (n, heads, dim), key_dim = v.shape, q.shape[2]
        if key_dim & (key_dim - 1):
            raise DeviceError(f"delta heads of {key_dim} channels: only powers of two", where="backend 'cuda'")
        out, (width, warps) = self._empty(n, heads, dim), self.delta_tile
        matrix = state.delta.transpose(1, 2)  # [heads, dv, dk], contiguous
        mixers.delta_kernel[(heads * triton.cdiv(dim, width),)](
            q,
            k,
            v,
            decay,
            beta,
            matrix,
            out,
            n,
            heads,
            heads // q.shape[1],
            dim,
            width,
            _log(key_dim),
            num_warps=warps,
            **EXACT,
        )
        return out

    # Experts.

    def route(self, logits: Tensor, bias: Tensor | None, router: Router) -> tuple[Tensor, Tensor]:
        broken = ~torch.isfinite(logits).all()
        if self.defer_checks:
            self._broken = broken if self._broken is None else self._broken | broken
        elif bool(broken):
            raise _not_finite()
        if router.kind == "noaux_tc":
            assert bias is not None
            return self._route_groups(logits, bias, router)
        n, experts = logits.shape
        ids = torch.empty(n, router.k, dtype=torch.int32, device=self.device.name)
        weights = self._empty(n, router.k)
        pad = 1 << _log(router.k)
        rows.route_kernel[(n,)](
            logits.contiguous(), ids, weights, experts, router.k, router.scale, _log(experts), pad, router.normalize,
            num_warps=4, **EXACT,
        )  # fmt: skip
        return ids, weights

    def check(self) -> None:
        """Raise what `route` would have, where checks were deferred."""
        broken, self._broken = self._broken, None
        if broken is not None and bool(broken):
            self.refuse_scores()

    def refuse_scores(self) -> None:
        raise _not_finite()

    def _route_groups(self, logits: Tensor, bias: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        """Top-k of biased sigmoids within the groups whose two best experts add up to most. Sums go in rank order."""
        scores = self.sigmoid(logits)
        grouped = (scores + bias).reshape(len(logits), router.n_groups, -1)
        best = grouped.sort(dim=-1, descending=True, stable=True).values
        two = best[:, :, 0] + best[:, :, 1] if best.shape[2] > 1 else best[:, :, 0]
        groups = two.sort(dim=-1, descending=True, stable=True).indices[:, : router.top_groups]
        kept = torch.zeros_like(two, dtype=torch.bool).scatter_(1, groups, True)
        masked = torch.where(kept[:, :, None], grouped, float("-inf")).reshape(scores.shape)
        ids = masked.sort(dim=-1, descending=True, stable=True).indices[:, : router.k]
        weights = scores.gather(1, ids)
        if router.normalize:
            total = weights[:, 0]
            for rank in range(1, router.k):
                total = total + weights[:, rank]
            weights = weights / (total + 1e-20)[:, None]
        return ids.to(torch.int32), weights * router.scale

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, arrivals: Arrivals) -> Tensor:
        """Expert by expert, each copied to the device when its turn comes."""
        chosen, weights = self.to_numpy(ids), self._tensor(weights).contiguous()
        n, k = chosen.shape
        outputs = self._empty(n * k, x.shape[1])
        x = self._tensor(x)
        for bank, experts in arrivals:
            for expert in experts:
                places = self._up.tensor(np.flatnonzero(chosen.reshape(-1) == expert), "places")
                gate, up, down = (self._up.matrix(bank[expert][part]) for part in ("gate", "up", "down"))
                mine = x[places // k]
                inner = self.silu(self.linear(mine, gate)) * self.linear(mine, up)
                outputs[places] = self.linear(inner, down)
        return self._combine(outputs, weights)

    def pooled_experts(self, x: Tensor, ids: Tensor, weights: Tensor, pool: ExpertPool, layer: int) -> Tensor:
        """The same with every expert in a slot: rows are put side by side by expert, all experts are one product."""
        (n, k), hidden = ids.shape, x.shape[1]
        width, count = pool.shape.width, pool.table.shape[1]
        ids, block = ids.contiguous(), 512
        edges = torch.zeros(count + 1, dtype=torch.int32, device=x.device)
        place, whose = (torch.empty(n * k, dtype=torch.int32, device=x.device) for _ in range(2))
        grid = (triton.cdiv(n * k, block),)
        rows.count_kernel[grid](ids, edges[1:], place, n * k, block)
        edges = torch.cumsum(edges, 0, dtype=torch.int32)
        rows.spread_kernel[grid](ids, edges, place, whose, n * k, k, block)
        p, turns = self._products, 2
        digits = p.digits(x.contiguous(), 64, 4)
        gate, up = (p.grouped(digits, whose, edges, pool.matrices(layer, name), width, turns) for name in ("gate", "up"))
        inner = p.digits(gate, 64, 4, up)
        all_rows = torch.arange(n * k, dtype=torch.int32, device=x.device)
        y = p.grouped(inner, all_rows, edges, pool.matrices(layer, "down"), hidden, turns)
        return self._combine(y, weights, place)

    def experts_in_rounds(
        self, x: Tensor, ids: Tensor, weights: Tensor, pool: ExpertPool, layer: int, rounds: Iterable[Sequence[int]]
    ) -> Tensor:
        """As `pooled_experts`, some experts at a time. `rounds`: those that are in slots until the next are asked for."""
        (n, k), chosen = ids.shape, self.to_numpy(ids).reshape(-1)
        outputs, one = self._empty(n * k, x.shape[1]), torch.ones(n * k, 1, device=x.device)
        ids, whole = self._tensor(ids), None
        for experts in rounds:
            mine = np.isin(chosen, experts)
            if mine.all():
                whole = self.pooled_experts(x, ids, weights, pool, layer)
                continue  # and the rounds come to their end
            places = self._up.tensor(np.flatnonzero(mine), "places")
            if len(places):
                some = ids.reshape(-1, 1)[places]
                outputs[places] = self.pooled_experts(x[places // k], some, one[: len(places)], pool, layer)
        return self._combine(outputs, weights) if whole is None else whole

    def _combine(self, outputs: Tensor, weights: Tensor, places: Tensor | None = None) -> Tensor:
        """Sums in rank order. `places`: the row of each choice, in the order of choices where there is none."""
        (n, k), dim, block = weights.shape, outputs.shape[1], 512
        if places is None:
            places = torch.arange(n * k, dtype=torch.int32, device=self.device.name)
        y = self._empty(n, dim)
        rows.combine_kernel[(n, triton.cdiv(dim, block))](outputs, places, weights, y, dim, k, block, **EXACT)
        return y


def _not_finite() -> NumericError:
    return NumericError("the router's scores are not finite", hint="a weight of this layer or before is broken")


def _log(n: int) -> int:
    """Of the next power of two."""
    return max(0, (n - 1).bit_length())
