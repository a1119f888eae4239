// Sixteen rows of 256 coded inputs, by one warp: fetched into its own part of shared memory, multiplied on integer tensor cores.
//
// The 8 columns of a tensor-core product are 4 groups x 2 digits, so lane t of a quad ends with the exact sums of group t.
// An input's place within the product is free: 16 bytes of a row go to one lane as they are in the file, and copies put them
// where that lane reads them. Scales of sixteen rows are fetched by all warps that share them, whole rows at a time.
#pragma once
#include "arith.cuh"

constexpr int TILE = 2048;  // bytes of codes
template <int N>
constexpr int SCALE_ROW = N / 16 + (N > 256 ? 16 : 0);  // scales and biases of a row; the rest keeps rows in other banks
template <int N>
constexpr int SCALES = 16 * SCALE_ROW<N>;

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void copy16(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory"); }
DEVICE void copy8(u32 to, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory"); }
DEVICE void copy4(u32 to, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory"); }
DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int THREADS>
DEVICE void meet(int id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory"); }
template <int LEFT>
DEVICE void arrived() {  // all but the last LEFT groups of this warp's copies
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
  __syncwarp();
}

struct Matrix {
  const char *codes, *scales, *biases;
};

// Scales of sixteen rows, by THREADS threads of which this is one.
template <int N, int THREADS>
DEVICE void fetch_scales(char* to, const Matrix& m, i64 row, int thread) {
  constexpr int ROW = N / 32, CHUNK = ROW < 16 ? 8 : 16, PER_ROW = ROW / CHUNK;
#pragma unroll
  for (int i = thread; i < 32 * PER_ROW; i += THREADS) {
    const int r = i / PER_ROW % 16, at = i % PER_ROW * CHUNK;
    const bool bias = i >= 16 * PER_ROW;
    const char* from = (bias ? m.biases : m.scales) + (row + r) * ROW + at;
    const u32 place = shared_address(to) + r * SCALE_ROW<N> + (bias ? ROW : 0) + at;
    if (CHUNK == 16) copy16(place, from);
    else copy8(place, from);
  }
}

// Rows of a matrix by sixteens, each as it lies in shared memory: codes of all slices, then scales.
template <int N>
constexpr int PACKED = N / 256 * TILE + SCALES<N>;

#if PDL
// Hopper's bulk copy: one thread asks for a whole tile, and all wait for it at its barrier.
DEVICE void fetch_packed(char* to, const char* from, int n_bytes, unsigned long long* barrier) {
  const u32 at = shared_address(barrier);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(n_bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from), "r"(n_bytes), "r"(at) : "memory");
}
DEVICE void wait_packed(unsigned long long* barrier) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(shared_address(barrier)) : "memory");
  } while (!done);
}
#else
// Scales of a tile, by THREADS threads of which this is one; codes of one slice, by the warp that multiplies them.
template <int N, int THREADS>
DEVICE void fetch_packed_scales(char* to, const char* from, int thread) {
  constexpr int AT = N / 256 * TILE;
#pragma unroll
  for (int i = thread; i < SCALES<N> / 16; i += THREADS) copy16(shared_address(to) + AT + i * 16, from + AT + i * 16);
}
DEVICE void fetch_packed_slice(char* to, const char* from, int slice) {
  const int at = slice * TILE + (threadIdx.x & 31) * 16;
#pragma unroll
  for (int i = 0; i < TILE; i += 512) copy16(shared_address(to) + at + i, from + at + i);
}
#endif

// 4-bit codes of a matrix with N inputs: a lane of a product takes 32 inputs of each half of the slice.
template <int N>
DEVICE void fetch(char* tile, const Matrix& m, i64 row, int slice) {
  const int lane = threadIdx.x & 31, r = lane >> 3, c = lane & 7, half = c >> 2;
  const u32 to = shared_address(tile);
  const char* from = m.codes + (row + r) * (N / 2) + slice * 128 + c * 16;
  const u32 at = to + half * 512 + ((r ^ half) * 4 + (c & 3)) * 16;
#pragma unroll
  for (int i = 0; i < 4; i++) copy16(at + (i >> 1) * 1024 + (i & 1) * 256, from + i * 4 * (N / 2));
}

// 8-bit codes of one half of a slice.
template <int N>
DEVICE void fetch_bytes(char* tile, const Matrix& m, i64 row, int slice, int half) {
  const int lane = threadIdx.x & 31, r = lane >> 3, c = lane & 7, odd = c & 1;
  const u32 to = shared_address(tile);
  const char* from = m.codes + (row + r) * N + slice * 256 + half * 128 + c * 16;
  const u32 at = to + odd * 512 + ((r ^ odd) * 4 + (c >> 1)) * 16;
#pragma unroll
  for (int i = 0; i < 4; i++) copy16(at + (i >> 1) * 1024 + (i & 1) * 256, from + i * 4 * N);
}

// This lane's column of the activations: zeros where the inputs are of another group than the column's.
struct Column {
  uint4 first[2], second[2];  // of each half: words 0, 1 and words 2, 3
  float2 group;
};

template <int N>
DEVICE Column column(const Digits<N>& d, int slice) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, group = g >> 1, half = group >> 1;
  const uint4* p = (const uint4*)(((g & 1) ? d.low : d.high) + slice * 32 + (t + 4 * half) * 4);
  const uint4 a = p[0], b = p[1], zero = make_uint4(0, 0, 0, 0);
  const bool mine = (t >> 1) == (group & 1);
  Column c;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    c.first[i] = mine && half == i ? a : zero;
    c.second[i] = mine && half == i ? b : zero;
  }
  c.group = d.group[slice * 4 + t];
  return c;
}

DEVICE void product(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE float quad_tree(float a, float b) {
  float v[2] = {a, b};
  halve(v, 1);
  return v[0] + swap(v[0], 2);
}

struct Scale {
  u16 scale, bias;
};

// Of this lane's group.
template <int N>
DEVICE Scale scale(const char* scales, int slice, int row) {
  const u16* p = (const u16*)(scales + row * SCALE_ROW<N>) + slice * 4 + (threadIdx.x & 3);
  return {p[0], p[N / 64]};
}

DEVICE float term(int d, Scale s, float step, float mass) { return fmaf(bf16(s.scale) * step, (float)d, bf16(s.bias) * mass); }

// Codes at even places, what is left of a word without the odd ones: a multiplication, because logic runs at half its rate.
DEVICE u32 without(u32 word, u32 odd) {
  u32 r;
  asm("mad.lo.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(odd), "r"(-(int)blockDim.y), "r"(word));  // blockDim.y is 1, which the compiler does not know
  return r;
}

DEVICE void pair(int (&e)[4], int (&o)[4], u32 a, u32 b, u32 c, u32 d, const uint4& x) {
  const u32 ao = a & 0xf0f0f0f0u, bo = b & 0xf0f0f0f0u, co = c & 0xf0f0f0f0u, d_o = d & 0xf0f0f0f0u;
  product(o, ao, bo, co, d_o, x.y, x.w);
  product(e, without(a, ao), without(b, bo), without(c, co), without(d, d_o), x.x, x.z);
}

// The tree of four groups: even lanes of a quad get that of row g, odd ones that of row g + 8.
template <int N>
DEVICE void multiply(const char* tile, const char* scales, int slice, const Column& c, float& y) {
  const int lane = threadIdx.x & 31;
  const uint4* p = (const uint4*)tile;
  const uint4 u[2] = {p[lane], p[32 + (lane ^ 4)]}, v[2] = {p[64 + lane], p[96 + (lane ^ 4)]};
  const Scale s0 = scale<N>(scales, slice, lane >> 2), s1 = scale<N>(scales, slice, (lane >> 2) + 8);
  int e[4] = {0, 0, 0, 0}, o[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    pair(e, o, u[i].x, v[i].x, u[i].y, v[i].y, c.first[i]);
    pair(e, o, u[i].z, v[i].z, u[i].w, v[i].w, c.second[i]);
  }
  const int d0 = (e[0] * 16 + o[0]) * 256 + (e[1] * 16 + o[1]), d1 = (e[2] * 16 + o[2]) * 256 + (e[3] * 16 + o[3]);
  y = quad_tree(term(d0, s0, c.group.x, c.group.y), term(d1, s1, c.group.x, c.group.y));
}

// The same for one half of a slice of 8-bit codes; the other half's groups count as zero.
template <int N>
DEVICE void multiply_bytes(const char* tile, const char* scales, int slice, const Column& c, int half, float& y) {
  const int lane = threadIdx.x & 31, t = lane & 3;
  const uint4* p = (const uint4*)tile;
  const uint4 u[2] = {p[lane], p[32 + (lane ^ 4)]}, v[2] = {p[64 + lane], p[96 + (lane ^ 4)]};
  const uint4 b[2] = {half ? c.first[1] : c.first[0], half ? c.second[1] : c.second[0]};
  const Scale s0 = scale<N>(scales, slice, lane >> 2), s1 = scale<N>(scales, slice, (lane >> 2) + 8);
  int d[4] = {0, 0, 0, 0};
#define EVEN(a, b) __byte_perm(a, b, 0x6420)
#define ODD(a, b) __byte_perm(a, b, 0x7531)
#pragma unroll
  for (int i = 0; i < 2; i++) {
    product(d, EVEN(u[i].x, u[i].y), EVEN(v[i].x, v[i].y), ODD(u[i].x, u[i].y), ODD(v[i].x, v[i].y), b[i].x, b[i].y);
    product(d, EVEN(u[i].z, u[i].w), EVEN(v[i].z, v[i].w), ODD(u[i].z, u[i].w), ODD(v[i].z, v[i].w), b[i].z, b[i].w);
  }
#undef EVEN
#undef ODD
  const bool mine = (t >> 1) == half;
  const float step = c.group.x * 16.f;
  const float y0 = term(d[0] * 256 + d[1], s0, step, c.group.y);
  const float y1 = term(d[2] * 256 + d[3], s1, step, c.group.y);
  y = quad_tree(mine ? y0 : 0.f, mine ? y1 : 0.f);
}

// Rows g and g + 8 of what a warp multiplied, into sums [slice][stride].
DEVICE void leave(float* sums, float y) {
  const int lane = threadIdx.x & 31;
  if ((lane & 2) == 0) sums[(lane >> 2) + (lane & 1) * 8] = y;
}

// Blocks of four groups in ascending order.
template <int SLICES>
DEVICE float in_order(const float* sums, int stride) {
  float y = 0.f;
#pragma unroll
  for (int i = 0; i < SLICES; i++) y = y + sums[i * stride];
  return y;
}
