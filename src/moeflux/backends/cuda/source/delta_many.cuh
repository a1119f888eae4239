// The delta net over a chunk of tokens: convolution and what follows it, then the recurrence, token by token.
#pragma once
#include "arith.cuh"

constexpr int RUN = 16;  // tokens of one warp in the convolution, and of one stage in the recurrence

// One head of channels through the convolution, RUN tokens from `first` on; `take(token, u)` gets silu of it, DK / 32 a lane.
template <int EACH, typename Take>
DEVICE void convolve(const float* inputs, const float* state, const float* taps, int channel, int first, int n, Take take) {
  float tap[EACH][4], old[3][EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) load(tap[i], taps + (channel + i) * 4);
#pragma unroll
  for (int i = 0; i < 3; i++) {
    const int at = first - 3 + i;
    load(old[i], at < 0 ? state + (at + 3) * CHANNELS + channel : inputs + (i64)at * INPUTS + channel);
  }
  for (int token = first; token < min(first + RUN, n); token++) {
    float y[EACH], u[EACH];
    load(y, inputs + (i64)token * INPUTS + channel);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      float a = old[0][i] * tap[i][0] + old[1][i] * tap[i][1];
      a = a + old[2][i] * tap[i][2] + y[i] * tap[i][3];
      u[i] = silu(a);
      old[0][i] = old[1][i]; old[1][i] = old[2][i]; old[2][i] = y[i];
    }
    take(token, u);
  }
}

template <int EACH>
DEVICE float dot(const float (&a)[EACH], const float (&b)[EACH]) {
  float p[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) p[i] = a[i] * b[i];
  return lanes_tree<32>(tree(p));
}

// A warp for each head and RUN tokens: queries and keys of one key head, values of one value head, or the gates of all.
// q, k [T, KEY_HEADS, DK], normalised; v [T, HEADS, DV]; of each token and key head their product; decay and beta [T, HEADS].
extern "C" __global__ void __launch_bounds__(128) mix_many(const float* inputs, const float* state, const float* taps, const float* log, const float* bias, float scale, int n,
                                                           float* q, float* k, float* v, float* product, float* decay, float* beta) {
  constexpr int EACH = DK / 32, WIDE = DV / 32;
  constexpr int PARTS = KEY_HEADS + HEADS + 1;
  const int lane = threadIdx.x & 31, job = blockIdx.x * 4 + (threadIdx.x >> 5), part = job % PARTS, first = job / PARTS * RUN;
  if (first >= n) return;
  if (part < KEY_HEADS) {
    const int head = part;
    convolve<EACH>(inputs, state, taps, head * DK + lane * EACH, first, n, [&](int token, float(&u)[EACH]) {
      const float r = inverse_root(dot(u, u) + 1e-6f);
#pragma unroll
      for (int i = 0; i < EACH; i++) u[i] = u[i] * r * scale;
      store(q + ((i64)token * KEY_HEADS + head) * DK + lane * EACH, u);
    });
    convolve<EACH>(inputs, state, taps, (KEY_HEADS + head) * DK + lane * EACH, first, n, [&](int token, float(&u)[EACH]) {
      const float r = inverse_root(dot(u, u) + 1e-6f);
      float query[EACH];
      const i64 at = ((i64)token * KEY_HEADS + head) * DK + lane * EACH;
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        u[i] = u[i] * r;
        query[i] = q[at + i];
      }
      store(k + at, u);
      const float p = dot(u, query);
      if (lane == 0) product[token * KEY_HEADS + head] = p;
    });
  } else if (part < KEY_HEADS + HEADS) {
    const int head = part - KEY_HEADS;
    convolve<WIDE>(inputs, state, taps, 2 * KEY_HEADS * DK + head * DV + lane * WIDE, first, n,
        [&](int token, float(&u)[WIDE]) { store(v + ((i64)token * HEADS + head) * DV + lane * WIDE, u); });
  } else {
    for (int token = first; token < min(first + RUN, n); token++)
      for (int h = lane; h < HEADS; h += 32) {
        const float* row = inputs + (i64)token * INPUTS + CHANNELS + GATES;
        beta[token * HEADS + h] = sigmoid(row[h]);
        decay[token * HEADS + h] = exponential(-exponential(log[h]) * softplus(row[HEADS + h] + bias[h]));
      }
  }
}

// The recurrence over 32 columns of one value head: LANES lanes share a column. State [heads, DV, DK].
#ifndef DELTA_LANES
#define DELTA_LANES 8
#endif
constexpr int LANES = DELTA_LANES, DELTA_THREADS = LANES * 32;
struct Stage {
  float q[RUN][DK], k[RUN][DK], v[RUN][32], decay[RUN], beta[RUN], product[RUN];
};

extern "C" __global__ void __launch_bounds__(DELTA_THREADS) delta_many(const float* q, const float* k, const float* v, const float* decay, const float* beta, const float* product, int n, float* state, float* out) {
  constexpr int EACH = DK / LANES, QUADS = DK / 4;
  __shared__ __align__(16) Stage stages[2];
  const int thread = threadIdx.x, lane = thread & 31, part = lane % LANES, head = blockIdx.x / (DV / 32), first = blockIdx.x % (DV / 32) * 32;
  const int column = thread / LANES, key = head / (HEADS / KEY_HEADS);
  float* mine = state + (i64)(head * DV + first + column) * DK + part * EACH;
  float s[EACH];
  load(s, mine);
  auto fetch_run = [&](int from) {
    Stage& to = stages[(from / RUN) & 1];
    const int count = min(RUN, n - from);
    for (int i = thread; i < count * QUADS; i += DELTA_THREADS) {  // quads of a lane lie QUADS / EACH apart, so that lanes read neighbours
      const int token = i / QUADS, c = i % QUADS, at = (c % (EACH / 4)) * LANES + c / (EACH / 4);
      const i64 row = ((i64)(from + token) * KEY_HEADS + key) * DK + c * 4;
      copy16(shared_address(&to.q[token][at * 4]), q + row);
      copy16(shared_address(&to.k[token][at * 4]), k + row);
    }
    for (int i = thread; i < count * 8; i += DELTA_THREADS) copy16(shared_address(&to.v[i / 8][i % 8 * 4]), v + ((i64)(from + i / 8) * HEADS + head) * DV + first + i % 8 * 4);
    if (thread < count) {
      copy4(shared_address(&to.decay[thread]), decay + (i64)(from + thread) * HEADS + head);
      copy4(shared_address(&to.beta[thread]), beta + (i64)(from + thread) * HEADS + head);
      copy4(shared_address(&to.product[thread]), product + (i64)(from + thread) * KEY_HEADS + key);
    }
  };
  fetch_run(0);
  commit();
  for (int from = 0; from < n; from += RUN) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    if (from + RUN < n) fetch_run(from + RUN);
    commit();
    const Stage& now = stages[(from / RUN) & 1];
    const int count = min(RUN, n - from);
#pragma unroll 2
    for (int token = 0; token < count; token++) {
      float kk[EACH], p[EACH], r[EACH];
#pragma unroll
      for (int i = 0; i < EACH; i += 4) {
        const float4 a = *(const float4*)&now.k[token][(i / 4 * LANES + part) * 4], b = *(const float4*)&now.q[token][(i / 4 * LANES + part) * 4];
        kk[i] = a.x; kk[i + 1] = a.y; kk[i + 2] = a.z; kk[i + 3] = a.w;
        r[i] = s[i] * b.x; r[i + 1] = s[i + 1] * b.y; r[i + 2] = s[i + 2] * b.z; r[i + 3] = s[i + 3] * b.w;
      }
#pragma unroll
      for (int i = 0; i < EACH; i++) p[i] = s[i] * kk[i];
      const float by_key = lanes_tree<LANES>(tree(p)), by_query = lanes_tree<LANES>(tree(r));
      const float g = now.decay[token], change = now.beta[token] * (now.v[token][column] - g * by_key);
      if (part == 0) out[((i64)(from + token) * HEADS + head) * DV + first + column] = g * by_query + change * now.product[token];
#pragma unroll
      for (int i = 0; i < EACH; i++) s[i] = fmaf(change, kk[i], s[i] * g);
    }
  }
  store(mine, s);
}

// x * weight * silu(z) / rms of each head, as digits. z lies behind the channels of a token's inputs.
extern "C" __global__ void __launch_bounds__(GATES / 8) gated_digits(const float* x, const float* norm, const float* inputs, float eps, char* digits, float2* groups) {
  const int c = threadIdx.x * 8;
  float v[8], z[8], weight[8], square[8];
  load(v, x + (i64)blockIdx.x * GATES + c);
  load(z, inputs + (i64)blockIdx.x * INPUTS + CHANNELS + c);
  load(weight, norm + c % DV);
#pragma unroll
  for (int i = 0; i < 8; i++) square[i] = v[i] * v[i];
  const float r = inverse_root(lanes_tree<DV / 8>(tree(square)) * (1.f / DV) + eps);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = v[i] * weight[i] * silu(z[i]) * r;
  write_digits(v, digits, groups, blockIdx.x, GATES, threadIdx.x);
}
