// Attention of one token in chunks of 32 positions, and their join: the bits of kernels/mixers.py and decode_attention.py.
#pragma once
#include "mixers.cuh"

constexpr int CHUNK = 32, EACH_LANE = HEAD_DIM / 32, ROW_STRIDE = HEAD_DIM * 2 + 16;  // bytes of a row; the rest keeps rows in other banks
constexpr int ATTEND_WARPS = 12;

DEVICE u32 to_bf16(float x) {  // to the nearest, ties to even
  const u32 u = __float_as_uint(x);
  return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

// float32 as three bf16 parts, cut off, so that each is exact; two numbers, the first lowest.
DEVICE void thirds(u32 (&part)[3], float a, float b) {
#pragma unroll
  for (int i = 0; i < 3; i++) {
    const u32 x = __float_as_uint(a) & 0xffff0000u, y = __float_as_uint(b) & 0xffff0000u;
    part[i] = (x >> 16) | y;
    a = a - __uint_as_float(x);
    b = b - __uint_as_float(y);
  }
}

// Rows 0..7 of a product of 16; the others are zero.
DEVICE void product_bf16(float (&c)[4], u32 a0, u32 a2, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
}

// A head's channels, EACH_LANE a lane: normed, and the first 2 HALF of them turned, channel i with i + HALF.
DEVICE void norm_rotate(float (&x)[EACH_LANE], const float (&norm)[EACH_LANE], const float (&cos)[EACH_LANE], const float (&sin)[EACH_LANE], float eps) {
  const int lane = threadIdx.x & 31;
  float square[EACH_LANE];
#pragma unroll
  for (int i = 0; i < EACH_LANE; i++) square[i] = x[i] * x[i];
  const float r = inverse_root(lanes_tree<32>(tree(square)) * (1.f / HEAD_DIM) + eps);
#pragma unroll
  for (int i = 0; i < EACH_LANE; i++) {
    x[i] = x[i] * r * norm[i];
    const float other = swap(x[i], HALF / EACH_LANE);
    if (lane * EACH_LANE < 2 * HALF) x[i] = x[i] * cos[i] + other * sin[i];
  }
}

struct Kept {  // block i of the keys lies keys[i] * 16 bytes behind base
  char* base;
  const i64 *keys, *values;
};

// One chunk of one group of heads. y: q of STRIDE per head, then k, then v. Whose chunk holds the token's position keeps its row.
extern "C" __global__ void __launch_bounds__(ATTEND_WARPS * 32) attend(const float* y, const float* q_norm, const float* k_norm, float eps, const float* cosines,
                                                                       const float* sines, Kept kept, float* parts, const int* at, float scale, int n_chunks) {
  __shared__ __align__(16) char queries[3][8 * ROW_STRIDE];
  __shared__ float scores[8][CHUNK];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const int group = blockIdx.x % KV_HEADS, chunk = blockIdx.x / KV_HEADS, first = chunk * CHUNK, position = *at;
  if (first > position) return;
  char *keys = memory, *values = memory + CHUNK * ROW_STRIDE;
  // Rows of tokens before were written in earlier steps, so they need not wait.
  char* kept_keys = kept.base + kept.keys[first / ROWS_BLOCK] * 16;
  char* kept_values = kept.base + kept.values[first / ROWS_BLOCK] * 16;
  constexpr int CHUNKS_16 = HEAD_DIM / 8;
  for (int i = thread; i < 2 * CHUNK * CHUNKS_16; i += ATTEND_WARPS * 32) {
    const int n = i / CHUNKS_16 % CHUNK, c = i % CHUNKS_16;
    const bool value = i >= CHUNK * CHUNKS_16;
    char* to = (value ? values : keys) + n * ROW_STRIDE + c * 16;
    if (first + n < position) copy16(shared_address(to), (value ? kept_values : kept_keys) + ((i64)((first + n) % ROWS_BLOCK * KV_HEADS + group) * HEAD_DIM + c * 8) * 2);
    else if (first + n > position) *(uint4*)to = make_uint4(0, 0, 0, 0);
  }
  commit();
  float norm[EACH_LANE], cos[EACH_LANE], sin[EACH_LANE];
  const bool is_key = warp == 8;
  if (warp < RATIO || is_key) {
    load(norm, (is_key ? k_norm : q_norm) + lane * EACH_LANE);
#pragma unroll
    for (int i = 0; i < EACH_LANE; i++) {
      const int c = lane * EACH_LANE + i;
      cos[i] = c < 2 * HALF ? cosines[position * HALF + c % HALF] : 1.f;
      sin[i] = c < 2 * HALF ? sines[position * HALF + c % HALF] : 0.f;
      if (c < HALF) sin[i] = -sin[i];
    }
  }
  turn<false>();
  float x[EACH_LANE];
  const int behind = KV_HEADS * RATIO * Q_STRIDE + group * HEAD_DIM + lane * EACH_LANE;
  if (warp < RATIO) {
    load(x, y + (group * RATIO + warp) * Q_STRIDE + lane * EACH_LANE);
    norm_rotate(x, norm, cos, sin, eps);
#pragma unroll
    for (int i = 0; i < EACH_LANE; i += 2) {
      u32 part[3];
      thirds(part, x[i], x[i + 1]);
#pragma unroll
      for (int j = 0; j < 3; j++) *(u32*)(queries[j] + warp * ROW_STRIDE + (lane * EACH_LANE + i) * 2) = part[j];
    }
  } else if (warp < 8) {
#pragma unroll
    for (int i = 0; i < EACH_LANE; i += 2)
#pragma unroll
      for (int j = 0; j < 3; j++) *(u32*)(queries[j] + warp * ROW_STRIDE + (lane * EACH_LANE + i) * 2) = 0;
  } else if (warp < 10 && position < first + CHUNK) {
    load(x, y + behind + (is_key ? 0 : KV_HEADS * HEAD_DIM));
    if (is_key) norm_rotate(x, norm, cos, sin, eps);
    char* mine = (is_key ? kept_keys : kept_values) + ((i64)(position % ROWS_BLOCK * KV_HEADS + group) * HEAD_DIM + lane * EACH_LANE) * 2;
#pragma unroll
    for (int i = 0; i < EACH_LANE; i += 2) {
      const u32 pair = to_bf16(x[i]) | to_bf16(x[i + 1]) << 16;
      *(u32*)(mine + i * 2) = pair;
      *(u32*)((is_key ? keys : values) + (position - first) * ROW_STRIDE + (lane * EACH_LANE + i) * 2) = pair;
    }
  }
  arrived<0>();
  __syncthreads();
  if (warp < CHUNK / 8) {  // eight positions a warp, the smallest parts of the queries first
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    const char* b = keys + (warp * 8 + g) * ROW_STRIDE + t * 4;
    u32 low[HEAD_DIM / 16], high[HEAD_DIM / 16];
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++) {
      low[d] = *(const u32*)(b + d * 32);
      high[d] = *(const u32*)(b + d * 32 + 16);
    }
#pragma unroll
    for (int part = 2; part >= 0; part--) {
      const char* a = queries[part] + g * ROW_STRIDE + t * 4;
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 16; d++) product_bf16(c, *(const u32*)(a + d * 32), *(const u32*)(a + d * 32 + 16), low[d], high[d]);
    }
    *(float2*)&scores[g][warp * 8 + 2 * t] = make_float2(c[0], c[1]);
  }
  __syncthreads();
  // Every warp has all shares: of row g at positions 2t, 2t + 1 of each tile of eight.
  const float none = __uint_as_float(0xff800000u);
  float share[4][2], best = none;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int n = i * 8 + 2 * t + j;
      const float s = scores[g][n] * scale;
      share[i][j] = first + n <= position ? s : none;
      best = fmaxf(best, share[i][j]);
    }
  best = fmaxf(best, swap(best, 1));
  best = fmaxf(best, swap(best, 2));
  float sums[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int j = 0; j < 2; j++) share[i][j] = exponential(share[i][j] - (best == none ? 0.f : best));
    sums[i] = lanes_tree<4>(share[i][0] + share[i][1]);
  }
  u32 a[4][3];
#pragma unroll
  for (int i = 0; i < 4; i++) thirds(a[i], share[i][0], share[i][1]);
  float* place = parts + ((i64)(group * RATIO + g) * n_chunks + chunk) * (HEAD_DIM + 8);
  for (int tile = warp; tile < HEAD_DIM / 8; tile += ATTEND_WARPS) {
    u32 b[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(shared_address(values + lane * ROW_STRIDE + tile * 16)) : "memory");
    float o[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 2; i >= 0; i--) {
      product_bf16(o, a[0][i], a[1][i], b[0], b[1]);
      product_bf16(o, a[2][i], a[3][i], b[2], b[3]);
    }
    if (g < RATIO) *(float2*)(place + tile * 8 + 2 * t) = make_float2(o[0], o[1]);
  }
  if (warp == 0 && t == 0 && g < RATIO) *(float2*)(place + HEAD_DIM) = make_float2(best, tree(sums));
}

// The factor of what was computed beside `best`, now that `joined` is the largest score.
DEVICE float factor(float best, float joined) {
  const float none = __uint_as_float(0xff800000u);
  return best == none ? 0.f : exponential(best - (joined == none ? 0.f : joined));
}

// Chunks of kernels/decode_attention.py in ascending order, then the output gate. 64 channels of one head a block; a lane has
// the factors of one of 32 chunks.
extern "C" __global__ void __launch_bounds__(64) join(const float* parts, const float* y, const int* position, int n_chunks, int gated, int stride, int head, float* out) {
  const int lane = threadIdx.x & 31, which = blockIdx.x / (head / 64), channel = blockIdx.x % (head / 64) * 64 + threadIdx.x;
  const int n = *position / 32 + 1;
  const float* chunks = parts + (i64)which * n_chunks * (head + 8);
  turn<false>();
  const float gate = gated ? __ldcg(y + which * stride + head + channel) : 0.f, none = __uint_as_float(0xff800000u);
  float best = none, total = 0.f, sum = 0.f;
  for (int first = 0; first < n; first += 32) {
    const int count = min(32, n - first);
    float o[32];
#pragma unroll
    for (int i = 0; i < 32; i++) o[i] = i < count ? __ldcg(chunks + (first + i) * (head + 8) + channel) : 0.f;
    const float2 found = lane < count ? __ldcg((const float2*)(chunks + (first + lane) * (head + 8) + head)) : make_float2(none, 0.f);
    float joined = found.x;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
      const float before = __shfl_up_sync(ALL, joined, i);
      if (lane >= i) joined = fmaxf(joined, before);
    }
    joined = fmaxf(joined, best);
    float before = __shfl_up_sync(ALL, joined, 1);
    if (lane == 0) before = best;
    const float old = factor(before, joined), fresh = factor(found.x, joined);
#pragma unroll
    for (int i = 0; i < 32; i++)
      if (i < count) {
        const float a = __shfl_sync(ALL, old, i), b = __shfl_sync(ALL, fresh, i);
        total = total * a + __shfl_sync(ALL, found.y, i) * b;
        sum = sum * a + o[i] * b;
      }
    best = __shfl_sync(ALL, joined, count - 1);
  }
  sum = divide(sum, total);
  out[which * head + channel] = gated ? sum * sigmoid(gate) : sum;
}
