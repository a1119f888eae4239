// Router and shared expert's gate and up, the choice of experts, their gate and up, all downs and the sum.
#pragma once
#include "mixers.cuh"

constexpr int H_SLICES = HIDDEN / 256, W_SLICES = WIDTH / 256, LISTS = (EXPERTS + 31) / 32;
constexpr i64 CODE_BYTES = (i64)HIDDEN * WIDTH / 2, SCALE_BYTES = (i64)HIDDEN * WIDTH / 32, MATRIX_BYTES = CODE_BYTES + 2 * SCALE_BYTES;

// Matrix `which` (gate, up, down) of an expert slot, as in pool.py.
DEVICE Matrix in_slot(const char* pool, int slot, int which) {
  const char* p = pool + (i64)slot * 3 * MATRIX_BYTES + which * MATRIX_BYTES;
  return {p, p + CODE_BYTES, p + CODE_BYTES + SCALE_BYTES};
}

// Norm, then in the first blocks 16 rows each of the 8-bit router, in the others of the shared gate and up.
extern "C" __global__ void __launch_bounds__(H_SLICES * 64) route(Matrix router, int n_router, Matrix gate, Matrix up, Normed in, float* logits, float* inner) {
  __shared__ __align__(16) Digits<HIDDEN> digits;
  __shared__ float sums[H_SLICES][32];
  const int thread = threadIdx.x, warp = thread >> 5, slice = warp % H_SLICES, side = warp / H_SLICES;
  const bool routes = blockIdx.x < n_router;
  const int row = (routes ? blockIdx.x : blockIdx.x - n_router) * 16;
  char *mine = memory + warp * TILE, *scales = memory + H_SLICES * 2 * TILE + (routes ? 0 : side * SCALES<HIDDEN>);
  const Matrix m = {side ? up.codes : gate.codes, side ? up.scales : gate.scales, side ? up.biases : gate.biases};
  if (routes) fetch_scales<HIDDEN, H_SLICES * 64>(scales, router, row, thread);
  else fetch_scales<HIDDEN, H_SLICES * 32>(scales, m, row, thread % (H_SLICES * 32));
  commit();
  if (routes) fetch_bytes<HIDDEN>(mine, router, row, slice, side);
  else fetch<HIDDEN>(mine, m, row, slice);
  commit();
  float norm[8];
  if (side == 0) load(norm, in.norm + thread * 8);
  turn<(EARLY & 8) != 0>();
  if (side == 0) put_normed(in.hidden, in.squares, norm, in.eps, thread, digits);
  arrived<1>();
  __syncthreads();
  const Column c = column(digits, slice);
  float y;
  arrived<0>();
  if (routes) multiply_bytes<HIDDEN>(mine, scales, slice, c, side, y);
  else multiply<HIDDEN>(mine, scales, slice, c, y);
  leave(&sums[slice][side * 16], y);
  __syncthreads();
  if (thread >= 32) return;
  if (routes) {
    y = 0.f;
#pragma unroll
    for (int i = 0; i < H_SLICES; i++) y = y + (sums[i][thread & 15] + sums[i][16 + (thread & 15)]);
    if (thread < 16) logits[row + thread] = y;
  } else {
    const float y = in_order<H_SLICES>(&sums[0][thread], 32), other = __shfl_down_sync(ALL, y, 16);
    if (thread < 16) inner[row + thread] = silu(y) * other;
  }
}

// An integer that is larger where a float is larger; both zeros are one.
DEVICE u32 ordered(float x) {
  const u32 u = __float_as_uint(x + 0.f);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
DEVICE float unordered(u32 k) { return __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k); }

struct Choice {
  u32 keys[LISTS * 32];
  u32 best[LISTS * K];  // the best of each 32, largest first
  int slots[LISTS * K];
  int slot[K];
  float logit[K];
};

// The K largest logits, the lower index first where two are equal: within each 32 by counting, then of the lists' best.
// By THREADS threads from 0 on, which meet at barrier ID.
template <int ID, int THREADS>
DEVICE void choose(const float* logits, const int* table, Choice& c) {
  static_assert(LISTS * 32 <= THREADS && K <= 32 && K <= EXPERTS, "one thread for each expert");
  const int thread = threadIdx.x, list = thread >> 5, lane = thread & 31;
  if (list < LISTS) {
    const bool there = thread < EXPERTS;
    const u32 key = there ? ordered(__ldcg(logits + thread)) : 0;
    const int slot = there ? __ldcg(table + thread) : 0;
    c.keys[thread] = key;
    __syncwarp();
    const uint4* others = (const uint4*)(c.keys + list * 32);
    int rank = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint4 o = others[i];
      rank += (o.x > key) + (o.y > key) + (o.z > key) + (o.w > key);
    }
    if (__reduce_add_sync(ALL, (u32)rank) != 496u) rank += __popc(__match_any_sync(ALL, key) & ((1u << lane) - 1));
    if (there && rank < K) {
      c.best[list * K + rank] = key;
      c.slots[list * K + rank] = slot;
    }
  }
  meet<THREADS>(ID);
  // Four lanes for each of the lists' best: how many of the other lists come before it.
  for (int at = thread >> 2; at < LISTS * K; at += THREADS / 4) {
    const int own = at / K, part = lane & 3;
    const u32 key = c.best[at];
    int rank = part == 0 ? at % K : 0;
    for (int l = part; l < LISTS; l += 4) {
      if (l == own) continue;
      const u32 limit = key - (l < own ? 1u : 0u);
#pragma unroll
      for (int i = 0; i < K; i++) rank += c.best[l * K + i] > limit;
    }
    const u32 quad = 15u << (lane & 28);
    rank += __shfl_xor_sync(quad, rank, 1);
    rank += __shfl_xor_sync(quad, rank, 2);
    if (part == 0 && rank < K) {
      c.slot[rank] = c.slots[at];
      c.logit[rank] = unordered(key);
    }
  }
}

// silu(gate) * up of 32 rows of the expert of one rank. One side of the warps chooses while the other makes digits.
extern "C" __global__ void __launch_bounds__(H_SLICES * 64) gate_up(const char* pool, const int* table, const float* logits, Normed in, float* inner) {
  __shared__ __align__(16) Digits<HIDDEN> digits;
  __shared__ __align__(16) Choice choice;
  __shared__ float sums[2][H_SLICES][32];
  const int thread = threadIdx.x, warp = thread >> 5, slice = warp % H_SLICES, side = warp / H_SLICES;
  const int rank = blockIdx.x % K, row = (blockIdx.x / K) * 32 + side * 16;
  char *mine = memory + warp * 2 * TILE, *scales = memory + H_SLICES * 4 * TILE + side * 2 * SCALES<HIDDEN>;
  float norm[8];
  if (side) load(norm, in.norm + (thread - HIDDEN / 8) * 8);
  turn<false>();  // `down` reads what `route` wrote before its own turn
  if (side) put_normed(in.hidden, in.squares, norm, in.eps, thread - HIDDEN / 8, digits);
  else choose<1, HIDDEN / 8>(logits, table, choice);
  __syncthreads();
  const int slot = choice.slot[rank];
#pragma unroll
  for (int i = 0; i < 2; i++) fetch_scales<HIDDEN, H_SLICES * 32>(scales + i * SCALES<HIDDEN>, in_slot(pool, slot, i), row, thread % (H_SLICES * 32));
  commit();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    fetch<HIDDEN>(mine + i * TILE, in_slot(pool, slot, i), row, slice);
    commit();
  }
  const Column c = column(digits, slice);
  float y;
  arrived<2>();
  meet<H_SLICES * 32>(2 + side);
  arrived<1>();
  multiply<HIDDEN>(mine, scales, slice, c, y);
  leave(sums[side][slice], y);
  arrived<0>();
  multiply<HIDDEN>(mine + TILE, scales + SCALES<HIDDEN>, slice, c, y);
  leave(&sums[side][slice][16], y);
  __syncthreads();
  if (slice == 0) {
    const int lane = thread & 31;
    const float y = in_order<H_SLICES>(&sums[side][0][lane], 32), other = __shfl_down_sync(ALL, y, 16);
    if (lane < 16) inner[rank * WIDTH + row + lane] = silu(y) * other;
  }
}

// Sixteen rows of: residual + (experts in rank order, by their weights + shared expert by its gate).
extern "C" __global__ void __launch_bounds__((K + 1) * W_SLICES * 32) down(const char* pool, const int* table, Matrix shared, const float* logits, const float* inner,
                                                                          float scale, float* hidden, float* squares) {
  constexpr int THREADS = (K + 1) * W_SLICES * 32;
  __shared__ __align__(16) Digits<(K + 1) * WIDTH> digits;
  __shared__ __align__(16) Choice choice;
  __shared__ float sums[K + 1][W_SLICES][16], weights[K + 1];
  const int thread = threadIdx.x, warp = thread >> 5, rank = warp / W_SLICES, slice = warp % W_SLICES, row = blockIdx.x * 16 + (thread & 15);
  char *mine = memory + warp * TILE, *scales = memory + (K + 1) * W_SLICES * TILE + rank * SCALES<WIDTH>;
  if (rank == K) fetch_scales<WIDTH, W_SLICES * 32>(scales, shared, blockIdx.x * 16, thread % (W_SLICES * 32));
  if (rank == K) fetch<WIDTH>(mine, shared, blockIdx.x * 16, slice);
  choose<1, THREADS>(logits, table, choice);
  __syncthreads();
  const Matrix m = in_slot(pool, choice.slot[min(rank, K - 1)], 2);
  if (rank < K) fetch_scales<WIDTH, W_SLICES * 32>(scales, m, blockIdx.x * 16, thread % (W_SLICES * 32));
  commit();
  if (rank < K) fetch<WIDTH>(mine, m, blockIdx.x * 16, slice);
  commit();
  const float before = thread < 16 ? __ldcg(hidden + row) : 0.f;
  if (thread < K) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < K; i++) total = total + exponential(choice.logit[i] - choice.logit[0]);
    weights[thread] = divide(exponential(choice.logit[thread] - choice.logit[0]), total) * scale;
  } else if (thread == K) {
    weights[K] = sigmoid(__ldcg(logits + EXPERTS));
  }
  turn<(EARLY & 16) != 0>();
  float x[8];
  load(x, inner + thread * 8);
  put_digits(x, thread, digits);
  arrived<1>();
  __syncthreads();
  const Column c = column(digits, warp);
  float y;
  arrived<0>();
  multiply<WIDTH>(mine, scales, slice, c, y);
  leave(sums[rank][slice], y);
  __syncthreads();
  if (thread < 32) {
    float y = 0.f;
#pragma unroll
    for (int i = 0; i < K; i++) y = y + in_order<W_SLICES>(&sums[i][0][thread & 15], 16) * weights[i];
    y = y + in_order<W_SLICES>(&sums[K][0][thread & 15], 16) * weights[K];
    const float h = before + y;
    if (thread < 16) hidden[row] = h;
    leave_squares(squares, row, h);
  }
}
