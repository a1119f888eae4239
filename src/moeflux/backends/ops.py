"""Every block of every model, composed from primitives that a backend supplies.

This class is the oracle: a backend must implement the primitives and may override a block with a fast kernel, which
is then tested against the composition here. Arrays are opaque but for arithmetic, slicing and reshaping; every method
takes [T, ...] with T >= 1.

Exactness: a row of a result depends on its own token (and its sequence's state) alone. Primitives must therefore
reduce in an order that does not depend on T; expert outputs are added in rank order whatever order they came in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from moeflux.backends.account import StateAccount
from moeflux.backends.rope import mla_scale
from moeflux.backends.state import Array, DeltaState, KvState, LatentState, LayerState, Rows, Storage
from moeflux.core.config import Kv
from moeflux.formats.quant import Matrix
from moeflux.models.spec import Attention, DeltaNet, Layer, Mixer, Mla, Moe, Rope, Router

Handle = Any  # a weight as the backend keeps it
Weights = Mapping[str, Handle]
Arrivals = Iterable[tuple[Handle, Sequence[int]]]  # a bank and experts that are in it; good until the next is asked for

F32_BYTES = 4
Record = Callable[[str, Array], None]  # name of an intermediate result, its rows


@dataclass(frozen=True)
class LayerWeights:
    """One layer of the trunk as the backend keeps it. `fused`: what `Ops.fuse` made of it."""

    spec: Layer
    mixer: Weights
    ffn: Weights
    mixer_norm: Handle
    ffn_norm: Handle
    fused: Handle | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [start, stop) of a batch: new tokens of one sequence, whose first stands at `position`.

    `decodes`: they continue what was written last, so the experts of the next step will be alike. Else they are a prompt's.
    """

    start: int
    stop: int
    position: int
    state: Any = None
    decodes: bool = False

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


class Ops(ABC):
    name: str

    @property
    @abstractmethod
    def numerics(self) -> str:
        """The class of its arithmetic: engines of one class, on any machine, give the same bits (backends/numerics.py)."""

    # Weights and memory.

    @abstractmethod
    def zeros(self, shape: tuple[int, ...]) -> Array: ...

    @abstractmethod
    def storage(self, kv: Kv) -> Storage:
        """How the rows of a state are kept."""

    @abstractmethod
    def load_vector(self, values: Array) -> Handle:
        """From float32 numpy."""

    @abstractmethod
    def load_matrix(self, matrix: Matrix) -> Handle: ...

    @abstractmethod
    def load_embedding(self, matrix: Matrix) -> Handle: ...

    @abstractmethod
    def load_kv_b(self, matrix: Matrix, spec: Mla) -> tuple[Handle, Handle]:
        """kv_b_proj as the two stacks of the absorbed form: embed_q [H, rank, nope], unembed_out [H, value, rank]."""

    @abstractmethod
    def load_heads(self, matrix: Matrix) -> Handle:
        """One matrix per head: [H, out, in]."""

    @abstractmethod
    def place(self, n_bytes: int) -> Any:
        """Memory for a resident weight, to be read into before the weight is loaded: a writable uint8 numpy array."""

    @abstractmethod
    def allocate(self, n_bytes: int) -> Any:
        """Memory for expert slots: a writable uint8 numpy array that lives as long as something looks into it."""

    @abstractmethod
    def new_bank(self, n_experts: int) -> Handle:
        """An empty bank: the experts of one layer that are in memory, by number."""

    @abstractmethod
    def put_expert(self, bank: Handle, expert: int, matrices: Mapping[str, Matrix]) -> None:
        """Into the bank: gate, up and down, as views into a slot that stays as it is while the bank is used."""

    @abstractmethod
    def to_numpy(self, x: Array) -> Any: ...

    # Primitives.

    @abstractmethod
    def embed(self, table: Handle, ids: Sequence[int]) -> Array:
        """[T, hidden]"""

    @abstractmethod
    def linear(self, x: Array, weight: Handle) -> Array:
        """[T, in] -> [T, out]"""

    @abstractmethod
    def head_linear(self, x: Array, weight: Handle) -> Array:
        """[T, H, in] -> [T, H, out], each head with its own matrix."""

    @abstractmethod
    def rms_norm(self, x: Array, weight: Handle, eps: float) -> Array:
        """Over the last axis."""

    @abstractmethod
    def l2_norm(self, x: Array) -> Array:
        """x / sqrt(sum x^2 + 1e-6) over the last axis."""

    def gated_norm(self, x: Array, weight: Handle, z: Array, eps: float) -> Array:
        """The norm of each head times the gate."""
        return self.rms_norm(x, weight, eps) * self.silu(z)

    @abstractmethod
    def silu(self, x: Array) -> Array: ...

    @abstractmethod
    def sigmoid(self, x: Array) -> Array: ...

    @abstractmethod
    def rotate(self, x: Array, rope: Rope, position: int) -> Array:
        """Rotary embedding of [T, heads, dim], tokens at position, position + 1, ..."""

    @abstractmethod
    def attend(self, q: Array, keys: Array, values: Array, position: int, scale: float) -> Array:
        """Causal: q [T, H, D], keys [S, G, D], values [S, G, V] -> [T, H, V]. Token t sees position + t + 1 rows."""

    @abstractmethod
    def convolve(self, x: Array, weight: Handle, state: DeltaState) -> Array:
        """Causal depthwise convolution [T, C] with the inputs kept in `state`, which it moves on."""

    @abstractmethod
    def delta_rule(self, q: Array, k: Array, v: Array, decay: Array, beta: Array, state: DeltaState) -> Array:
        """The recurrence, token by token: q, k [T, Hk, dk], v [T, Hv, dv], decay, beta [T, Hv] -> [T, Hv, dv]."""

    @abstractmethod
    def delta_gates(self, a: Array, b: Array, a_log: Handle, dt_bias: Handle) -> tuple[Array, Array]:
        """decay = exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b)."""

    @abstractmethod
    def join(self, parts: Sequence[Array], axis: int) -> Array: ...

    @abstractmethod
    def route(self, logits: Array, bias: Handle | None, router: Router) -> tuple[Array, Array]:
        """Expert ids [T, k] ordered by (score descending, index ascending), and their weights [T, k]."""

    @abstractmethod
    def experts(self, x: Array, ids: Array, weights: Array, arrivals: Arrivals) -> Array:
        """Sum of the chosen experts' outputs [T, hidden], added in rank order, whatever order they arrive in."""

    # A layer, in two halves: between them the chosen experts are fetched.

    def fuse(self, layer: LayerWeights, eps: float) -> Handle | None:
        """What a backend wants to prepare in order to run the halves of this layer as a whole."""
        return None

    def run_mixer(
        self, w: LayerWeights, x: Array, spans: Sequence[Span], eps: float, record: Record | None
    ) -> tuple[Array, Array, Array | None, Array | None]:
        """x + mixer(norm(x)), its norm, and the router's ids and weights where the layer has one. May work in place."""
        mixed = self.mix(self.rms_norm(x, w.mixer_norm, eps), w.mixer, w.spec.mixer, spans, eps)
        x, h = self.add_norm(x, mixed, w.ffn_norm, eps)
        logits = ids = weights = None
        if isinstance(w.spec.ffn, Moe):
            logits, ids, weights = self.router(h, w.ffn["router"], w.ffn.get("router_bias"), w.spec.ffn.router)
        if record:
            for name, rows in (("mixer", mixed), ("ffn_input", h), ("router_logits", logits)):
                if rows is not None:
                    record(name, rows)
        return x, h, ids, weights

    def run_ffn(
        self,
        w: LayerWeights,
        x: Array,
        h: Array,
        ids: Array | None,
        weights: Array | None,
        arrivals: Arrivals,
        record: Record | None,
    ) -> Array:
        """x + experts(h) + shared expert(h), or x + mlp(h). May work in place."""
        if ids is None:
            return x + self.mlp(h, w.ffn)
        return self.add_experts(w, x, h, self.experts(h, ids, weights, arrivals), record)

    def add_experts(self, w: LayerWeights, x: Array, h: Array, y: Array, record: Record | None) -> Array:
        """x + y + shared expert(h), with y the routed experts' sum."""
        shared = self.shared_expert(h, w.ffn) if "shared_gate_proj" in w.ffn else None
        if record:
            record("experts", y)
            if shared is not None:
                record("shared", shared)
        return x + (y if shared is None else y + shared)

    # Blocks.

    def new_state(self, spec: Mixer, kv: Kv, account: StateAccount) -> LayerState:
        storage = self.storage(kv)
        match spec:
            case Attention(n_kv_heads=heads, head_dim=dim):
                return KvState(Rows(storage, heads, dim, account=account), Rows(storage, heads, dim, account=account))
            case Mla():
                return LatentState(Rows(storage, spec.latent_dim, account=account))
            case DeltaNet():
                conv, delta = (spec.conv_width - 1, spec.channels), (spec.n_value_heads, spec.key_dim, spec.value_dim)
                charge = account.take(F32_BYTES * (prod(conv) + prod(delta)))
                return DeltaState(self.zeros(conv), self.zeros(delta), charge, account)

    def mix(self, x: Array, w: Weights, spec: Mixer, spans: Sequence[Span], eps: float) -> Array:
        match spec:
            case Attention():
                return self.attention(x, w, spec, spans, eps)
            case Mla():
                return self.latent_attention(x, w, spec, spans)
            case DeltaNet():
                return self.delta_net(x, w, spec, spans, eps)

    def attention(self, x: Array, w: Weights, spec: Attention, spans: Sequence[Span], eps: float) -> Array:
        n, heads, dim = len(x), spec.n_heads, spec.head_dim
        q = self._biased(x, w, "q_proj").reshape(n, heads, -1)
        k = self._biased(x, w, "k_proj").reshape(n, spec.n_kv_heads, dim)
        v = self._biased(x, w, "v_proj").reshape(n, spec.n_kv_heads, dim)
        gate = q[:, :, dim:]  # [T, heads, dim] where gated, else empty
        q, k = self.rms_norm(q[:, :, :dim], w["q_norm"], eps), self.rms_norm(k, w["k_norm"], eps)
        mixed = self._each(spans, lambda span: self._attend_span(q, k, v, spec, span))
        if spec.gated:
            mixed = mixed * self.sigmoid(gate)
        return self._biased(mixed.reshape(n, heads * dim), w, "o_proj")

    def _attend_span(self, q: Array, k: Array, v: Array, spec: Attention, span: Span) -> Array:
        state: KvState = span.state
        state.keys.append(self._rotate_first(k[span.rows], spec.rope, span.position))
        state.values.append(v[span.rows])
        rotated = self._rotate_first(q[span.rows], spec.rope, span.position)
        return self.attend(rotated, state.keys.filled, state.values.filled, span.position, spec.head_dim**-0.5)

    def latent_attention(self, x: Array, w: Weights, spec: Mla, spans: Sequence[Span]) -> Array:
        n, rank = len(x), spec.kv_rank
        if spec.q_rank is None:
            q = self.linear(x, w["q_proj"])
        else:
            q = self.linear(self.rms_norm(self._biased(x, w, "q_a_proj"), w["q_a_norm"], spec.norm_eps), w["q_b_proj"])
        q = q.reshape(n, spec.n_heads, -1)
        q_latent = self.head_linear(q[:, :, : spec.nope_dim], w["embed_q"])  # [T, H, rank]
        q_rope = q[:, :, spec.nope_dim :]
        kv = self._biased(x, w, "kv_a_proj")
        latent = self.rms_norm(kv[:, :rank], w["kv_a_norm"], spec.norm_eps)
        k_rope = kv[:, None, rank:]  # [T, 1, rope]

        def attend(span: Span) -> Array:
            state: LatentState = span.state
            rows, position = span.rows, span.position
            key = self.rotate(k_rope[rows], spec.rope, position)[:, 0]
            state.latents.append(self.join([latent[rows], key], axis=-1))
            query = self.join([q_latent[rows], self.rotate(q_rope[rows], spec.rope, position)], axis=-1)
            cache = state.latents.filled[:, None]  # [S, 1, rank + rope]
            return self.attend(query, cache, cache[:, :, :rank], position, mla_scale(spec))

        mixed = self.head_linear(self._each(spans, attend), w["unembed_out"])
        return self._biased(mixed.reshape(n, -1), w, "o_proj")

    def delta_net(self, x: Array, w: Weights, spec: DeltaNet, spans: Sequence[Span], eps: float) -> Array:
        n, key_width = len(x), spec.n_key_heads * spec.key_dim
        qkv, z, b, a = self._delta_inputs(x, w, spec)
        decay, beta = self.delta_gates(a, b, w["A_log"], w["dt_bias"])

        def recur(span: Span) -> Array:
            rows = span.rows
            u = self.silu(self.convolve(qkv[rows], w["conv1d"], span.state))
            q = u[:, :key_width].reshape(-1, spec.n_key_heads, spec.key_dim)
            k = u[:, key_width : 2 * key_width].reshape(-1, spec.n_key_heads, spec.key_dim)
            v = u[:, 2 * key_width :].reshape(-1, spec.n_value_heads, spec.value_dim)
            q, k = self.l2_norm(q) * spec.key_dim**-0.5, self.l2_norm(k)
            return self.delta_rule(q, k, v, decay[rows], beta[rows], span.state)

        mixed = self.gated_norm(self._each(spans, recur), w["norm"], z, eps)
        return self.linear(mixed.reshape(n, -1), w["out_proj"])

    def _delta_inputs(self, x: Array, w: Weights, spec: DeltaNet) -> tuple[Array, Array, Array, Array]:
        """qkv [T, C] in the order q | k | v, z [T, Hv, dv], b and a [T, Hv]."""
        n, heads = len(x), spec.n_value_heads
        if not spec.fused:
            z = self.linear(x, w["in_proj_z"]).reshape(n, heads, spec.value_dim)
            return self.linear(x, w["in_proj_qkv"]), z, self.linear(x, w["in_proj_b"]), self.linear(x, w["in_proj_a"])
        groups, ratio = spec.n_key_heads, heads // spec.n_key_heads
        mixed = self.linear(x, w["in_proj_qkvz"]).reshape(n, groups, -1)
        dk, dv = spec.key_dim, ratio * spec.value_dim
        q, k = mixed[:, :, :dk], mixed[:, :, dk : 2 * dk]
        v, z = mixed[:, :, 2 * dk : 2 * dk + dv], mixed[:, :, 2 * dk + dv :]
        ba = self.linear(x, w["in_proj_ba"]).reshape(n, groups, -1)
        qkv = self.join([part.reshape(n, -1) for part in (q, k, v)], axis=-1)
        z = z.reshape(n, heads, spec.value_dim)
        return qkv, z, ba[:, :, :ratio].reshape(n, heads), ba[:, :, ratio:].reshape(n, heads)

    def add_norm(self, x: Array, y: Array, weight: Handle, eps: float) -> tuple[Array, Array]:
        """x + y, and its norm."""
        total = x + y
        return total, self.rms_norm(total, weight, eps)

    def mlp(self, x: Array, w: Weights, prefix: str = "") -> Array:
        gate, up = self.linear(x, w[f"{prefix}gate_proj"]), self.linear(x, w[f"{prefix}up_proj"])
        return self.linear(self.silu(gate) * up, w[f"{prefix}down_proj"])

    def shared_expert(self, x: Array, w: Weights) -> Array:
        """[T, hidden]; gated where the model has a gate."""
        y = self.mlp(x, w, "shared_")
        return y * self.sigmoid(self.linear(x, w["shared_gate"])) if "shared_gate" in w else y

    def router(self, x: Array, weight: Handle, bias: Handle | None, spec: Router) -> tuple[Array, Array, Array]:
        """Logits [T, experts], ids and weights [T, k]."""
        logits = self.linear(x, weight)
        return logits, *self.route(logits, bias, spec)

    def head(self, x: Array, norm: Handle, weight: Handle, eps: float) -> Array:
        """Logits [T, vocab]."""
        return self.linear(self.rms_norm(x, norm, eps), weight)

    def _biased(self, x: Array, w: Weights, role: str) -> Array:
        y = self.linear(x, w[role])
        return y + w[f"{role}.bias"] if f"{role}.bias" in w else y

    def _rotate_first(self, x: Array, rope: Rope, position: int) -> Array:
        """Rotate the first `rope.dim` channels, pass the others."""
        if rope.dim == x.shape[-1]:
            return self.rotate(x, rope, position)
        return self.join([self.rotate(x[:, :, : rope.dim], rope, position), x[:, :, rope.dim :]], axis=-1)

    def _each(self, spans: Sequence[Span], run: Any) -> Array:
        """Mixers see one sequence at a time; their rows are put back side by side."""
        return self.join([run(span) for span in spans], axis=0)
