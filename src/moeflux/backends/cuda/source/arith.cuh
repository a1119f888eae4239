// The arithmetic of kernels/arith.py, instruction for instruction: the same roundings and the same order of every sum.
// Compiled without contraction; where one rounding is meant, fmaf says so.
#pragma once
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
#define DEVICE __device__ __forceinline__
#define ALL 0xffffffffu

constexpr float RANGE = 32512.f;          // of a 16-bit activation: 127 * 256, so that both digits fit 8 bits
constexpr float SMALLEST = 1e-30f;        // a group whose largest activation is below counts as zero
constexpr float ROUND = 12582912.f;       // 1.5 * 2^23: adding it rounds to the nearest integer
constexpr u32 ROUND_BITS = 0x4B400000u;

// Wait for the phase before, then let the next one start. EARLY: let it start at once. It may then touch, before its own turn,
// only constants and what was written before the phase that this one waits for.
template <bool EARLY_>
DEVICE void turn() {
#if PDL
  if (EARLY_) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (!EARLY_) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE float divide(float a, float b) {
  float r;
  asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

DEVICE float exponential(float x) {
  float r;
  asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(x * 1.4426950408889634f));
  return r;
}

DEVICE float inverse_root(float x) {
  float r;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

DEVICE float sigmoid(float x) { return divide(1.f, 1.f + exponential(-x)); }
DEVICE float silu(float x) { return x * sigmoid(x); }
DEVICE float softplus(float x) { return fmaxf(x, 0.f) + logf(1.f + exponential(-fabsf(x))); }

DEVICE float bf16(u32 bits) { return __uint_as_float(bits << 16); }
DEVICE float swap(float x, int mask) { return __shfl_xor_sync(ALL, x, mask); }
DEVICE float larger(float a, float b) {  // NaN is kept
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// Neighbours are added until one number is left.
template <int N>
DEVICE float tree(const float (&x)[N]) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    float half[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) half[i] = x[2 * i] + x[2 * i + 1];
    return tree(half);
  }
}

// The same over LANES neighbouring lanes, for each of them.
template <int LANES>
DEVICE float lanes_tree(float x) {
#pragma unroll
  for (int i = 1; i < LANES; i <<= 1) x += swap(x, i);
  return x;
}

// N numbers in each of 32 lanes become the sums of N / 2 over pairs of lanes: those with `bit` keep the upper half.
template <int N>
DEVICE void halve(float (&v)[N], int bit) {
  const bool up = threadIdx.x & bit;
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    const float give = up ? v[i] : v[i + N / 2], keep = up ? v[i + N / 2] : v[i];
    v[i] = keep + swap(give, bit);
  }
}

template <int N>
DEVICE void load(float (&x)[N], const float* p) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 v = __ldcg((const float4*)(p + i));
      x[i] = v.x; x[i + 1] = v.y; x[i + 2] = v.z; x[i + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = __ldcg(p + i);
  }
}

template <int N>
DEVICE void store(float* p, const float (&x)[N]) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) *(float4*)(p + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) p[i] = x[i];
  }
}

// 1 / rms of a vector of N, of which whoever wrote it left the squares' sums over each 16 neighbours. One warp.
template <int N>
DEVICE float root(const float* squares, float eps) {
  constexpr int COUNT = N / 16, EACH = COUNT < 32 ? 1 : COUNT / 32;
  const int lane = threadIdx.x & 31;
  float v[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) v[i] = lane * EACH + i < COUNT ? squares[lane * EACH + i] : 0.f;
  return inverse_root(lanes_tree<32>(tree(v)) * (1.f / N) + eps);
}

// The sum of 16 squares, one in each of the lanes 0..15.
DEVICE void leave_squares(float* squares, int row, float h) {
  const float sum = lanes_tree<16>(h * h);
  if ((threadIdx.x & 15) == 0) squares[row / 16] = sum;
}

// Activations of N inputs as integers: per eight inputs the digits at even and at odd places, per group a 16th of its step
// (4-bit codes are taken 16 times too large) and the sum of its activations.
template <int N>
struct Digits {
  uint2 high[N / 8];
  uint4 apart;  // so that high and low digits of one place lie in other banks
  uint2 low[N / 8];
  float2 group[N / 64];
};

// Eight neighbours as digits; groups are those of eight lanes.
struct Rounded {
  uint2 high, low;  // digits at even and at odd places
  float step, mass;

  DEVICE Rounded(const float (&x)[8]) {
    float m = fabsf(x[0]);
#pragma unroll
    for (int i = 1; i < 8; i++) m = larger(m, fabsf(x[i]));
#pragma unroll
    for (int i = 1; i < 8; i <<= 1) m = larger(m, swap(m, i));
    const float infinity = __uint_as_float(0x7f800000u);
    if (!(m == m)) m = infinity;
    const bool some = m > SMALLEST;
    const float inverse = some && m < infinity ? divide(RANGE, m) : 0.f;
    step = some ? m * (float)(1.0 / 32512.0) : 0.f;
    u32 q[8], h[8], sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      q[i] = __float_as_uint(x[i] * inverse + ROUND);
      sum += q[i];
      h[i] = q[i] + 128;
    }
#define BYTES(a, b, c, d, at) __byte_perm(__byte_perm(a, b, at), __byte_perm(c, d, at), 0x5410)
    low = make_uint2(BYTES(q[0], q[2], q[4], q[6], 0x0040), BYTES(q[1], q[3], q[5], q[7], 0x0040));
    high = make_uint2(BYTES(h[0], h[2], h[4], h[6], 0x0051), BYTES(h[1], h[3], h[5], h[7], 0x0051));
#undef BYTES
    int total = (int)(sum - 8u * ROUND_BITS);
#pragma unroll
    for (int i = 1; i < 8; i <<= 1) total += __shfl_xor_sync(ALL, total, i);
    mass = step * (float)total;
  }
};

template <int N>
DEVICE void put_digits(const float (&x)[8], int word, Digits<N>& d) {
  const Rounded r(x);
  d.high[word] = r.high;
  d.low[word] = r.low;
  if ((word & 7) == 0) d.group[word >> 3] = make_float2(r.step * 0.0625f, r.mass);
}

// Digits of norm(h): the first N / 8 threads from `thread` on.
template <int N>
DEVICE void put_normed(const float* h, const float* squares, const float (&norm)[8], float eps, int thread, Digits<N>& d) {
  float x[8];
  load(x, h + thread * 8);
  const float r = root<N>(squares, eps);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = x[i] * r * norm[i];
  put_digits(x, thread, d);
}
