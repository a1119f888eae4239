from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

def instruction_set() -> str: ...

class Block:
    def __init__(self, n_bytes: int) -> None: ...
    def bytes(self) -> Bytes: ...

class Matrix:
    rows: int
    cols: int

class Heads:
    n_out: int

class Layer:
    def __init__(self) -> None: ...
    def matrix(self, role: str, matrix: Matrix) -> None: ...
    def vector(self, role: str, vector: F32) -> None: ...
    def heads(self, role: str, heads: Heads) -> None: ...
    def common(self, hidden: int, eps: float) -> None: ...
    def attention(self, heads: int, groups: int, dim: int, gated: bool, rotation: Rotation) -> None: ...
    def latent(self, heads: int, nope: int, rank: int, scale: float, eps: float, rotation: Rotation) -> None: ...
    def delta(self, key_heads: int, heads: int, key_dim: int, value_dim: int, width: int) -> None: ...
    def routing(
        self, sigmoid: bool, experts: int, k: int, groups: int, top_groups: int, normalize: bool, scale: float
    ) -> None: ...

class Bank:
    def __init__(self, experts: int) -> None: ...
    def put(self, expert: int, gate: Matrix, up: Matrix, down: Matrix) -> None: ...

class Rotation:
    def __init__(self, frequencies: Sequence[float], scale: float, interleaved: bool) -> None: ...

def plain_matrix(rows: int, cols: int, dtype: str, weight: Bytes) -> Matrix: ...
def affine_matrix(
    rows: int, cols: int, bits: int, group: int, dtype: str, weight: Bytes, scales: Bytes, biases: Bytes
) -> Matrix: ...
def fp8_matrix(rows: int, cols: int, block: int, dtype: str, weight: Bytes, scales: Bytes) -> Matrix: ...
def heads(matrix: Matrix, heads: int, first: int, rows: int, transposed: bool) -> Heads: ...

class Machine:
    threads: int
    isa: str
    seconds: float
    scratch_bytes: int
    def __init__(self, threads: int, isa: str, exact: bool, poison: bool) -> None: ...
    def linears(self, x: F32, matrices: tuple[Matrix, ...], y: tuple[F32, ...]) -> None: ...
    def head_linear(self, x: F32, weight: Heads, y: F32) -> None: ...
    def embed(self, table: Matrix, ids: Ints, y: F32) -> None: ...
    def rms_norm(self, x: F32, weight: F32, eps: float, y: F32) -> None: ...
    def add_norm(self, a: F32, b: F32, weight: F32, eps: float, total: F32, y: F32) -> None: ...
    def mlp(self, x: F32, gate: Matrix, up: Matrix, down: Matrix, output_gate: Matrix | None, y: F32) -> None: ...
    def attention(
        self,
        q: F32,
        k: F32,
        v: F32,
        q_norm: F32,
        k_norm: F32,
        eps: float,
        heads: int,
        groups: int,
        dim: int,
        gated: bool,
        rotation: Rotation,
        spans: list[Any],
        out: F32,
    ) -> None: ...
    def latent_attention(
        self,
        q_latent: F32,
        q: F32,
        nope: int,
        kv: F32,
        norm: F32,
        eps: float,
        scale: float,
        rotation: Rotation,
        spans: list[Any],
        out: F32,
    ) -> None: ...
    def delta_net(
        self,
        qkv: F32,
        z: F32,
        a: F32,
        b: F32,
        conv: F32,
        a_log: F32,
        dt_bias: F32,
        norm: F32,
        eps: float,
        key_heads: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        spans: list[Any],
        out: F32,
    ) -> None: ...
    def route(
        self,
        logits: F32,
        bias: F32 | None,
        k: int,
        groups: int,
        top_groups: int,
        normalize: bool,
        scale: float,
        ids: Ints,
        weights: F32,
    ) -> bool: ...
    def experts_some(self, x: F32, ids: Ints, bank: Bank, which: Ints, outputs: F32) -> None: ...
    def run_layers(self, layers: list[Any], x: F32, spans: list[Any], stream: Stream) -> int: ...
    def time_read(self, buffer: Bytes) -> float: ...
    def multiply_rate(self) -> float: ...
    def combine(self, outputs: F32, weights: F32, y: F32) -> None: ...

class Stream:
    width: int
    depth: int
    guessed: int
    asked: int
    foreseen: int
    routed: bytes  # int16
    def __init__(self, store: Store, machine: Machine, previous: bool, lookahead: bool, most: int) -> None: ...
    def record(self, on: bool) -> None: ...

class StoreError(RuntimeError):
    args: tuple[str, str, str, str, int]  # kind, what, where, hint, errno

class ExpertLayer:
    def __init__(self, n_experts: int) -> None: ...
    def component(self, projection: str, part: str, dtype: str, n_bytes: int, files: Ints, offsets: Ints) -> None: ...
    def matrix(
        self,
        name: str,
        rows: int,
        cols: int,
        codec: str,
        dtype: str,
        bits: int,
        group: int,
        block: int,
        weight: tuple[int, int],
        scales: tuple[int, int],
        biases: tuple[int, int],
    ) -> None: ...

class ReadJob:
    layer: int
    expert: int
    component: int
    file: int
    offset: int
    length: int
    hint: bool
    buffer: Bytes
    def finish(self, done: int, error: int = 0, retries: int = 0, message: str = "") -> None: ...

class StoreLease:
    left: int
    def next(self, wait: bool = True) -> list[int]: ...
    def views(self, expert: int) -> list[Bytes]: ...
    def release_some(self, experts: list[int]) -> None: ...
    def release(self) -> None: ...

class Store:
    closed: bool
    slot_bytes: int
    def acquire(self, layer: int, ids: Ints, sweep: bool = False) -> StoreLease: ...
    def hint(self, layer: int, ids: Ints, sweep: bool = False, soon: bool = False) -> None: ...
    def next_token(self) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def take_notes(self) -> list[str]: ...
    def resident(self) -> bytes: ...
    def slots(self) -> list[tuple[int, int, int, str]]: ...
    def take_job(self, timeout_s: float) -> ReadJob | None: ...

class Replay:
    useful: int
    wasted: int
    evictions: int
    def __init__(self, n_layers: int, n_experts: int, n_slots: int, floor: int, policy: str) -> None: ...
    def access(self, layer: int, ids: Ints, sweep: bool) -> list[int]: ...
    def hint(self, layer: int, ids: Ints) -> list[int]: ...
    def next_token(self) -> None: ...
    def holds(self, layer: int, expert: int) -> bool: ...
    def count(self, layer: int) -> int: ...

def open_store(
    paths: list[str],
    layers: list[ExpertLayer | None],
    n_slots: int,
    floor: int,
    policy: str,
    direct: bool,
    n_readers: int,
    sweep_slots: int,
) -> Store: ...
def slot_bytes(sizes: Sequence[int], direct: bool) -> int: ...
