// A prompt's chunk: products of many tokens and what stands between them, for one model's sizes, which come as macros:
// HIDDEN, WIDTH, K, EXPERTS, CHANNELS, GATES, HEADS (0: none), KEY_HEADS, DK, DV, ATTENTION (0: none), INPUTS: rows of the widest
// joined input projection.
#define PDL 0
#define MOST_EXPERTS EXPERTS
#include "many.cuh"

constexpr i64 CODE_BYTES = (i64)HIDDEN * WIDTH / 2, SCALE_BYTES = (i64)HIDDEN * WIDTH / 32, MATRIX_BYTES = CODE_BYTES + 2 * SCALE_BYTES;

DEVICE Matrix in_slot(const char* pool, int slot, int which) {
  const char* p = pool + (i64)slot * 3 * MATRIX_BYTES + which * MATRIX_BYTES;
  return {p, p + CODE_BYTES, p + CODE_BYTES + SCALE_BYTES};
}

// Rows of one matrix for all tokens; `before`: what is added to, or none.
template <int N, int BITS>
DEVICE void dense(const Matrix& m, const Work& w, const Activations& x, const float* before, float* y) {
  multiply_many<N, BITS>(w, x, [&](const Piece&) { return m; },
      [&](int token, int row, float v) {
        const i64 at = (i64)token * w.rows + row;
        y[at] = before ? before[at] + v : v;
      });
}
#define DENSE(name, n, bits) \
  extern "C" __global__ void __launch_bounds__(WARPS<bits> * 32, 1) name(Matrix m, Work w, Activations x, const float* before, float* y) { dense<n, bits>(m, w, x, before, y); }
DENSE(from_hidden, HIDDEN, 4)
DENSE(route_many, HIDDEN, 8)
DENSE(from_width, WIDTH, 4)
#if HEADS
DENSE(from_delta, GATES, 4)
#endif
#if ATTENTION
DENSE(from_attention, ATTENTION, 4)
#endif

// Gate and up of the experts in their slots, side by side: rows of the result have 2 * WIDTH. WIDTH is a multiple of a strip.
extern "C" __global__ void __launch_bounds__(WARPS<4> * 32, 1) gate_up_many(const char* pool, const int* table, Work w, Activations x, float* y) {
  multiply_many<HIDDEN, 4>(w, x,
      [&](const Piece& p) {
        const int which = p.row / WIDTH;
        Matrix m = in_slot(pool, table[p.expert], which);
        const i64 back = -(i64)which * WIDTH;  // rows are counted through both
        return Matrix{m.codes + back * (HIDDEN / 2), m.scales + back * (HIDDEN / 32), m.biases + back * (HIDDEN / 32)};
      },
      [&](int place, int row, float v) { y[(i64)place * (2 * WIDTH) + row] = v; });
}

extern "C" __global__ void __launch_bounds__(WARPS<4> * 32, 1) down_many(const char* pool, const int* table, Work w, Activations x, float* y) {
  multiply_many<WIDTH, 4>(w, x, [&](const Piece& p) { return in_slot(pool, table[p.expert], 2); },
      [&](int place, int row, float v) { y[(i64)place * HIDDEN + row] = v; });
}

// Digits of eight neighbours, into the places that `many.cuh` reads.
DEVICE void write_digits(const float (&x)[8], char* digits, float2* groups, i64 row, int n, int word) {
  const Rounded r(x);
  u32* to = (u32*)(digits + row * (2 * n) + (word >> 3) * 128) + ((word & 7) >> 1) * 4 + (word & 1);
  to[0] = r.high.x; to[2] = r.high.y; to[16] = r.low.x; to[18] = r.low.y;
  if ((word & 7) == 0) groups[row * (n / 64) + (word >> 3)] = make_float2(r.step, r.mass);
}

// Norm of one token a block.
extern "C" __global__ void __launch_bounds__(HIDDEN / 8) norm_digits(const float* x, const float* norm, float eps, char* digits, float2* groups) {
  __shared__ float sums[HIDDEN / 256];
  const int thread = threadIdx.x;
  float v[8], square[8], weight[8];
  load(v, x + (i64)blockIdx.x * HIDDEN + thread * 8);
  load(weight, norm + thread * 8);
#pragma unroll
  for (int i = 0; i < 8; i++) square[i] = v[i] * v[i];
  const float mine = lanes_tree<32>(tree(square));
  if ((thread & 31) == 0) sums[thread >> 5] = mine;
  __syncthreads();
  float all[HIDDEN / 256];
#pragma unroll
  for (int i = 0; i < HIDDEN / 256; i++) all[i] = sums[i];
  const float r = inverse_root(tree(all) * (1.f / HIDDEN) + eps);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = v[i] * r * weight[i];
  write_digits(v, digits, groups, blockIdx.x, HIDDEN, thread);
}

// silu(gate) * up of rows [2 * WIDTH].
extern "C" __global__ void __launch_bounds__(WIDTH / 8) inner_digits(const float* y, char* digits, float2* groups) {
  const float* row = y + (i64)blockIdx.x * (2 * WIDTH) + threadIdx.x * 8;
  float gate[8], up[8];
  load(gate, row);
  load(up, row + WIDTH);
#pragma unroll
  for (int i = 0; i < 8; i++) gate[i] = silu(gate[i]) * up[i];
  write_digits(gate, digits, groups, blockIdx.x, WIDTH, threadIdx.x);
}

#if ATTENTION
// Attended values times the sigmoid of their gates, which lie behind the queries of each head; `gated`: 0 for none.
extern "C" __global__ void __launch_bounds__(ATTENTION / 8) attended_digits(const float* mixed, const float* inputs, int gated, int head, int stride, char* digits, float2* groups) {
  const int c = threadIdx.x * 8;
  float v[8], gate[8];
  load(v, mixed + (i64)blockIdx.x * ATTENTION + c);
  if (gated) {
    load(gate, inputs + (i64)blockIdx.x * stride + (c / head) * (2 * head) + head + c % head);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = v[i] * sigmoid(gate[i]);
  }
  write_digits(v, digits, groups, blockIdx.x, ATTENTION, threadIdx.x);
}
#endif

// The K largest logits of a token, a warp each; where they go among their expert's tokens; whether one is not finite.
extern "C" __global__ void __launch_bounds__(256) choose_many(const float* logits, int n, int stride, float scale, int* ids, float* weights, int* place, int* counts, int* broken) {
  constexpr int EACH = (EXPERTS + 31) / 32;
  const int token = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (token >= n) return;
  u32 key[EACH];
  bool bad = false;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int e = i * 32 + lane;
    const float v = e < EXPERTS ? logits[(i64)token * stride + e] : 0.f;
    bad |= !(fabsf(v) < __uint_as_float(0x7f800000u));
    const u32 u = __float_as_uint(v + 0.f);
    key[i] = e < EXPERTS ? (u & 0x80000000u ? ~u : u | 0x80000000u) : 0;
  }
  if (__any_sync(ALL, bad) && lane == 0) *broken = 1;
  float top = 0.f, total = 0.f, share = 0.f;
  int mine = 0;
#pragma unroll 1
  for (int k = 0; k < K; k++) {
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) best = max(best, key[i]);
    best = __reduce_max_sync(ALL, best);
    u32 index = 0xffffffffu;
#pragma unroll
    for (int i = EACH - 1; i >= 0; i--) index = key[i] == best ? i * 32 + lane : index;
    index = __reduce_min_sync(ALL, index);
#pragma unroll
    for (int i = 0; i < EACH; i++) key[i] = i * 32 + lane == index ? 0 : key[i];
    const float value = __uint_as_float(best & 0x80000000u ? best & 0x7fffffffu : ~best);
    if (k == 0) top = value;
    const float part = exponential(value - top);
    total = total + part;
    if (lane == k) {
      share = part;
      mine = min(index, (u32)EXPERTS - 1);
    }
  }
  if (lane < K) {
    ids[token * K + lane] = mine;
    weights[token * K + lane] = divide(share, total) * scale;
    place[token * K + lane] = atomicAdd(counts + mine, 1);  // their order does not matter: rows stay apart
  }
}

// Counts become edges; one block.
extern "C" __global__ void __launch_bounds__(32) edge_many(const int* counts, int* edges) {
  constexpr int EACH = (EXPERTS + 31) / 32;
  const int first = threadIdx.x * EACH;
  int mine = 0;
  for (int i = first; i < min(first + EACH, EXPERTS); i++) mine += counts[i];
  int sum = mine;
#pragma unroll
  for (int i = 1; i < 32; i <<= 1) {
    const int before = __shfl_up_sync(ALL, sum, i);
    if (threadIdx.x >= i) sum += before;
  }
  sum -= mine;
  for (int i = first; i < min(first + EACH, EXPERTS); i++) {
    edges[i] = sum;
    sum += counts[i];
    if (i == EXPERTS - 1) edges[EXPERTS] = sum;
  }
}

// Choices side by side by expert: `whose` token a row is, `place` becomes the row of a choice.
extern "C" __global__ void __launch_bounds__(256) spread_many(const int* ids, const int* edges, int* place, int* whose, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= n) return;
  const int row = edges[ids[i]] + place[i];
  whose[row] = i / K;
  place[i] = row;
}

// x + (experts in rank order, by their weights + shared expert by its gate).
extern "C" __global__ void __launch_bounds__(HIDDEN / 4) combine_many(const float* y, const int* place, const float* weights, const float* shared, const float* logits, int stride, float* x) {
  const i64 token = blockIdx.x;
  const int c = threadIdx.x * 4;
  float acc[4] = {0.f, 0.f, 0.f, 0.f}, v[4];
#pragma unroll
  for (int k = 0; k < K; k++) {
    load(v, y + (i64)place[token * K + k] * HIDDEN + c);
    const float w = weights[token * K + k];
#pragma unroll
    for (int i = 0; i < 4; i++) acc[i] = acc[i] + w * v[i];
  }
  const float gate = sigmoid(logits[token * stride + EXPERTS]);
  load(v, shared + token * HIDDEN + c);
#pragma unroll
  for (int i = 0; i < 4; i++) acc[i] = acc[i] + v[i] * gate;
  load(v, x + token * HIDDEN + c);
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = v[i] + acc[i];
  store(x + token * HIDDEN + c, v);
}

#if HEADS
#include "delta_many.cuh"
#endif
