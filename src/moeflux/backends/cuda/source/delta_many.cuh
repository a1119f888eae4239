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

// The recurrence over 32 columns of one value head, four a warp, of each DK / 32 numbers a lane. State [heads, DV, DK].
struct Stage {
  float q[RUN][DK], k[RUN][DK], v[RUN][32], out[RUN][32];
  float4 gates[RUN];  // decay, beta, key times query
};

template <int N>
DEVICE void take(float (&x)[N], const float* p) {
  if constexpr (N == 4) {
    const float4 v = *(const float4*)p;
    x[0] = v.x; x[1] = v.y; x[2] = v.z; x[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = p[i];
  }
}

// What one token needs, for one lane.
struct Row {
  float k[DK / 32], q[DK / 32], v;
  float4 gates;

  DEVICE void read(const Stage& now, int token, int lane, int column) {
    take(k, now.k[token] + lane * (DK / 32));
    take(q, now.q[token] + lane * (DK / 32));
    v = now.v[token][column];
    gates = now.gates[token];
  }
};

extern "C" __global__ void __launch_bounds__(256) delta_many(const float* q, const float* k, const float* v, const float* decay, const float* beta, const float* product, int n, float* state, float* out) {
  constexpr int EACH = DK / 32, QUADS = DK / 4;
  __shared__ __align__(16) Stage stages[2];
  const int thread = threadIdx.x, lane = thread & 31, head = blockIdx.x / (DV / 32), first = blockIdx.x % (DV / 32) * 32, own = (thread >> 5) * 4;
  const int column = own + ((lane >> 1) & 1) * 2 + ((lane >> 2) & 1), key = head / (HEADS / KEY_HEADS);
  float* mine = state + (i64)(head * DV + first + own) * DK + lane * EACH;
  float s[4][EACH];
#pragma unroll
  for (int c = 0; c < 4; c++) load(s[c], mine + c * DK);
  auto fetch_run = [&](int from) {
    Stage& to = stages[(from / RUN) & 1];
    const int count = min(RUN, n - from);
    for (int i = thread; i < count * QUADS; i += 256) {
      const int token = i / QUADS, c = i % QUADS * 4;
      const i64 row = ((i64)(from + token) * KEY_HEADS + key) * DK + c;
      copy16(shared_address(&to.q[token][c]), q + row);
      copy16(shared_address(&to.k[token][c]), k + row);
    }
    for (int i = thread; i < count * 8; i += 256) copy16(shared_address(&to.v[i / 8][i % 8 * 4]), v + ((i64)(from + i / 8) * HEADS + head) * DV + first + i % 8 * 4);
    if (thread < count) {
      copy4(shared_address(&to.gates[thread].x), decay + (i64)(from + thread) * HEADS + head);
      copy4(shared_address(&to.gates[thread].y), beta + (i64)(from + thread) * HEADS + head);
      copy4(shared_address(&to.gates[thread].z), product + (i64)(from + thread) * KEY_HEADS + key);
    }
  };
  auto step = [&](const Row& r, float* to) {
    float by[8], p[EACH];  // by key, by query
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
      for (int i = 0; i < EACH; i++) p[i] = s[c][i] * r.k[i];
      by[c] = tree(p);
#pragma unroll
      for (int i = 0; i < EACH; i++) p[i] = s[c][i] * r.q[i];
      by[4 + c] = tree(p);
    }
    halve(by, 1);
    halve(*(float(*)[4])by, 2);
    halve(*(float(*)[2])by, 4);
    float sum = by[0] + swap(by[0], 8);
    sum = sum + swap(sum, 16);
    // Even lanes hold by key, odd ones by query, of `column`.
    const float g = r.gates.x, change = r.gates.y * (r.v - g * sum);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const float d = __shfl_sync(ALL, change, (c >> 1) * 2 + (c & 1) * 4);
#pragma unroll
      for (int i = 0; i < EACH; i++) s[c][i] = fmaf(d, r.k[i], s[c][i] * g);
    }
    const float reading = g * sum + swap(change, 1) * r.gates.z;
    if ((lane & 25) == 1) to[column] = reading;
  };
  fetch_run(0);
  commit();
  for (int from = 0; from < n; from += RUN) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    if (from + RUN < n) fetch_run(from + RUN);
    commit();
    Stage& now = stages[(from / RUN) & 1];
    const int count = min(RUN, n - from);
    Row a, b;  // what the next token needs is on its way while this one is computed
    a.read(now, 0, lane, column);
#pragma unroll 1
    for (int token = 0; token < count; token += 2) {
      b.read(now, min(token + 1, RUN - 1), lane, column);
      step(a, now.out[token]);
      if (token + 1 < count) {
        a.read(now, min(token + 2, RUN - 1), lane, column);
        step(b, now.out[token + 1]);
      }
    }
    __syncwarp();
    if (lane < count) *(float4*)(out + ((i64)(from + lane) * HEADS + head) * DV + first + own) = *(const float4*)&now.out[lane][own];
  }
#pragma unroll
  for (int c = 0; c < 4; c++) store(mine + c * DK, s[c]);
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
