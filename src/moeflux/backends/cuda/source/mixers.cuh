// Norm and input projections with what follows them, the delta rule, the output projection.
#pragma once
#include "tile.cuh"

extern __shared__ __align__(128) char memory[];

struct Normed {  // the hidden vector, its squares' sums, the norm's weight
  const float *hidden, *squares, *norm;
  float eps;
};

struct Convolution {  // state [3, channels], `place[0]` * 16 bytes behind `base`; of the gates: logarithms and biases
  float* base;
  const i64* place;
  const float *taps, *log, *bias;
};

// What a row of the delta net's projections becomes: through the convolution, gate of the output, beta, decay.
struct Ready {
  float old[3], taps[4], log, bias;
  float* state;

  DEVICE void prepare(const Convolution& c, int row) {
    if (row < CHANNELS) {
      state = c.base + c.place[0] * 4 + row;
#pragma unroll
      for (int i = 0; i < 3; i++) old[i] = __ldcg(state + i * CHANNELS);
      load(taps, c.taps + row * 4);
    } else if (row >= CHANNELS + GATES + HEADS && row < CHANNELS + GATES + 2 * HEADS) {
      log = c.log[row - CHANNELS - GATES - HEADS];
      bias = c.bias[row - CHANNELS - GATES - HEADS];
    }
  }

  DEVICE void write(float* out, int row, float y) {
    if (row < CHANNELS) {
      state[0] = old[1];
      state[CHANNELS] = old[2];
      state[2 * CHANNELS] = y;
      float a = old[0] * taps[0] + old[1] * taps[1];
      a = a + old[2] * taps[2] + y * taps[3];
      out[row] = silu(a);
    } else if (row < CHANNELS + GATES) {
      out[row] = silu(y);
    } else if (row < CHANNELS + GATES + HEADS) {
      out[row] = sigmoid(y);
    } else if (row < CHANNELS + GATES + 2 * HEADS) {
      out[row] = exponential(-exponential(log) * softplus(y + bias));
    }
  }
};

// TILES x 16 rows a block; SIDES tiles at a time, a warp for each slice of 256 inputs.
template <bool DELTA, int TILES>
DEVICE void project(const char* w, int n_tiles, const Normed& in, const Convolution& conv, float* out) {
  constexpr int SLICES = HIDDEN / 256, ROUNDS = (TILES + SIDES - 1) / SIDES;
  __shared__ __align__(16) Digits<HIDDEN> digits;
  __shared__ float sums[SLICES][TILES * 16];
  const int thread = threadIdx.x, warp = thread >> 5, slice = warp % SLICES, side = warp / SLICES;
  const int first = blockIdx.x * TILES, count = min(TILES, n_tiles - first), row = first * 16 + thread;
#if PDL
  __shared__ unsigned long long barriers[TILES];
  if (thread < count) fetch_packed(memory + thread * PACKED<HIDDEN>, w + (i64)(first + thread) * PACKED<HIDDEN>, PACKED<HIDDEN>, barriers + thread);
#else
  for (int tile = side; tile < count; tile += SIDES)
    fetch_packed_scales<HIDDEN, SLICES * 32>(memory + tile * PACKED<HIDDEN>, w + (i64)(first + tile) * PACKED<HIDDEN>, thread % (SLICES * 32));
  commit();
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const int tile = i * SIDES + side;
    if (tile < count) fetch_packed_slice(memory + tile * PACKED<HIDDEN>, w + (i64)(first + tile) * PACKED<HIDDEN>, slice);
    commit();
  }
#endif
  float norm[8];
  if (thread < HIDDEN / 8) load(norm, in.norm + thread * 8);
  Ready ready;
  if (DELTA && thread < count * 16) ready.prepare(conv, row);
  turn<DELTA && (EARLY & 1) != 0>();
  if (thread < HIDDEN / 8) put_normed(in.hidden, in.squares, norm, in.eps, thread, digits);
#if !PDL
  arrived<ROUNDS>();
#endif
  __syncthreads();
  const Column c = column(digits, slice);
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const int tile = i * SIDES + side;
#if !PDL
    if (i == 0) arrived<ROUNDS - 1>();
    if (i == 1) arrived<(ROUNDS > 2 ? ROUNDS - 2 : 0)>();
    if (i > 1) arrived<0>();
#endif
    if (tile < count) {
#if PDL
      wait_packed(barriers + tile);
#endif
      const char* mine = memory + tile * PACKED<HIDDEN>;
      float y;
      multiply<HIDDEN>(mine + slice * TILE, mine + SLICES * TILE, slice, c, y);
      leave(&sums[slice][tile * 16], y);
    }
  }
  __syncthreads();
  if (thread < count * 16) {
    const float y = in_order<SLICES>(&sums[0][thread], TILES * 16);
    if (DELTA) ready.write(out, row, y);
    else out[row] = y;
  }
}

#define PROJECT_THREADS (HIDDEN / 256 * SIDES * 32)
#if HEADS
extern "C" __global__ void __launch_bounds__(PROJECT_THREADS, PROJECT_THREADS <= 512 ? 2 : 1) project_delta(const char* w, int n_tiles, Normed in, Convolution conv, float* out) {
  project<true, PROJECT_DELTA_TILES>(w, n_tiles, in, conv, out);
}

// The delta rule of one token over 32 columns of one value head, four a warp; state [heads, DV, DK].
// Left for the output projection: the reading times norm weight and gate, and the sum of squares of each four readings.
extern "C" __global__ void __launch_bounds__(256) delta(const float* y, float* base, const i64* place, const float* norm, float scale,
                                                        float* out, float* squares) {
  constexpr int EACH = DK / 32;
  const int lane = threadIdx.x & 31, head = blockIdx.x / (DV / 32), first = (blockIdx.x % (DV / 32)) * 32 + (threadIdx.x >> 5) * 4;
  const int key = head / (HEADS / KEY_HEADS), mine = first + ((lane >> 1) & 1) * 2 + ((lane >> 2) & 1);
  float* state = base + place[0] * 4 + (i64)(head * DV + first) * DK + lane * EACH;
  float s[4][EACH];
#pragma unroll
  for (int i = 0; i < 4; i++) load(s[i], state + i * DK);
  const float weight = norm[mine];
  turn<(EARLY & 2) != 0>();
  float q[EACH], k[EACH], p[EACH];
  load(q, y + key * DK + lane * EACH);
  load(k, y + (KEY_HEADS + key) * DK + lane * EACH);
  const float value = __ldcg(y + 2 * KEY_HEADS * DK + head * DV + mine), gate = __ldcg(y + CHANNELS + head * DV + mine);
  const float beta = __ldcg(y + CHANNELS + GATES + head), decay = __ldcg(y + CHANNELS + GATES + HEADS + head);
  float sizes[2];
#pragma unroll
  for (int i = 0; i < EACH; i++) p[i] = q[i] * q[i];
  sizes[0] = tree(p);
#pragma unroll
  for (int i = 0; i < EACH; i++) p[i] = k[i] * k[i];
  sizes[1] = tree(p);
  halve(sizes, 1);
#pragma unroll
  for (int i = 2; i < 32; i <<= 1) sizes[0] += swap(sizes[0], i);
  sizes[1] = swap(sizes[0], 1);
  const float root_q = inverse_root(((lane & 1) ? sizes[1] : sizes[0]) + 1e-6f), root_k = inverse_root(((lane & 1) ? sizes[0] : sizes[1]) + 1e-6f);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    q[i] = q[i] * root_q * scale;
    k[i] = k[i] * root_k;
    p[i] = k[i] * q[i];
  }
  const float key_query = lanes_tree<32>(tree(p));
  float by[8];  // by key, by query
#pragma unroll
  for (int c = 0; c < 4; c++) {
#pragma unroll
    for (int i = 0; i < EACH; i++) p[i] = s[c][i] * k[i];
    by[c] = tree(p);
#pragma unroll
    for (int i = 0; i < EACH; i++) p[i] = s[c][i] * q[i];
    by[4 + c] = tree(p);
  }
  halve(by, 1);
  halve(*(float(*)[4])by, 2);
  halve(*(float(*)[2])by, 4);
  float sum = by[0] + swap(by[0], 8);
  sum = sum + swap(sum, 16);
  // Even lanes hold by key, odd ones by query, of column `mine`.
  const float change = beta * (value - decay * sum), theirs = swap(change, 1);
  const float reading = decay * sum + theirs * key_query;
  float square = reading * reading;
  square += swap(square, 4);
  square += swap(square, 2);
  if ((lane & 25) == 1) out[head * DV + mine] = reading * weight * gate;
  if (lane == 1) squares[(head * DV + first) / 4] = square;
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const float d = __shfl_sync(ALL, change, (c >> 1) * 2 + (c & 1) * 4);
#pragma unroll
    for (int i = 0; i < EACH; i++) s[c][i] = fmaf(d, k[i], s[c][i] * decay);
    store(state + c * DK, s[c]);
  }
}
#endif
#if ATTENTION
extern "C" __global__ void __launch_bounds__(PROJECT_THREADS) project_full(const char* w, int n_tiles, Normed in, float* out) {
  project<false, PROJECT_FULL_TILES>(w, n_tiles, in, Convolution(), out);
}
#endif

// Sixteen rows of the output projection onto the residual stream. DELTA: heads come with the squares' sums of each four.
template <bool DELTA, int INNER>
DEVICE void output(const Matrix& w, const float* mixed, const float* sizes, float eps, float* hidden, float* squares) {
  constexpr int SLICES = INNER / 256;
  __shared__ __align__(16) Digits<INNER> digits;
  __shared__ float sums[SLICES][16];
  const int thread = threadIdx.x, slice = thread >> 5, row = blockIdx.x * 16 + (thread & 15);
  char *mine = memory + slice * TILE, *scales = memory + SLICES * TILE;
  fetch_scales<INNER, SLICES * 32>(scales, w, blockIdx.x * 16, thread);
  commit();
  fetch<INNER>(mine, w, blockIdx.x * 16, slice);
  commit();
  turn<(EARLY & 4) != 0>();
  const float before = thread < 16 ? __ldcg(hidden + row) : 0.f;
  float x[8];
  load(x, mixed + thread * 8);
  if (DELTA) {
    const float2 size = __ldcg((const float2*)sizes + thread);
    const float r = inverse_root(lanes_tree<DV / 8>(size.x + size.y) * (1.f / DV) + eps);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = x[i] * r;
  }
  put_digits(x, thread, digits);
  arrived<1>();
  __syncthreads();
  const Column c = column(digits, slice);
  float y;
  arrived<0>();
  multiply<INNER>(mine, scales, slice, c, y);
  leave(sums[slice], y);
  __syncthreads();
  if (thread < 32) {
    const float h = before + in_order<SLICES>(&sums[0][thread & 15], 16);
    if (thread < 16) hidden[row] = h;
    leave_squares(squares, row, h);
  }
}

#if HEADS
extern "C" __global__ void __launch_bounds__(GATES / 8) output_delta(Matrix w, const float* mixed, const float* sizes, float eps, float* hidden, float* squares) {
  output<true, GATES>(w, mixed, sizes, eps, hidden, squares);
}
#endif
#if ATTENTION
extern "C" __global__ void __launch_bounds__(ATTENTION / 8) output_full(Matrix w, const float* mixed, float* hidden, float* squares) {
  output<false, ATTENTION>(w, mixed, nullptr, 0.f, hidden, squares);
}
#endif
