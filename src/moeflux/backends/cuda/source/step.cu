// One decoded token: the phases of kernels/step.py for one model's sizes, which come as macros.
//
// HIDDEN, WIDTH, K, EXPERTS; of the delta net CHANNELS, GATES, HEADS (0: none), KEY_HEADS, DK, DV; ATTENTION: heads x channels
// (0: none), KV_HEADS, RATIO: heads of one group, HEAD_DIM, HALF: of the channels that turn, Q_STRIDE, ROWS_BLOCK; tiles of a block PROJECT_DELTA_TILES, PROJECT_FULL_TILES, HEAD_TILES; SIDES; EARLY: phases that let the next start at once; PDL: Hopper's instructions, which are programmatic dependent launch
// and bulk copies; without, everything runs on Ampere.
#include "experts.cuh"
#if ATTENTION
#include "attention.cuh"
#endif

// HEAD_TILES (2 or 4) x 16 rows of the vocabulary, and the largest of them with its lowest place.
extern "C" __global__ void __launch_bounds__(H_SLICES * 32) head(const char* w, Normed in, float* logits, float* best, int* index) {
  __shared__ __align__(16) Digits<HIDDEN> digits;
  __shared__ float sums[H_SLICES][HEAD_TILES * 16], found[HEAD_TILES * 16];
  const int thread = threadIdx.x, slice = thread >> 5;
  const i64 row = (i64)blockIdx.x * HEAD_TILES * 16;
  w += (i64)blockIdx.x * HEAD_TILES * PACKED<HIDDEN>;
#if PDL
  __shared__ unsigned long long barriers[HEAD_TILES];
  if (thread < HEAD_TILES) fetch_packed(memory + thread * PACKED<HIDDEN>, w + thread * PACKED<HIDDEN>, PACKED<HIDDEN>, barriers + thread);
#else
#pragma unroll
  for (int i = 0; i < HEAD_TILES; i++) fetch_packed_scales<HIDDEN, H_SLICES * 32>(memory + i * PACKED<HIDDEN>, w + i * PACKED<HIDDEN>, thread);
  commit();
#pragma unroll
  for (int i = 0; i < HEAD_TILES; i++) {
    fetch_packed_slice(memory + i * PACKED<HIDDEN>, w + i * PACKED<HIDDEN>, slice);
    commit();
  }
#endif
  float norm[8];
  load(norm, in.norm + thread * 8);
  turn<false>();
  put_normed(in.hidden, in.squares, norm, in.eps, thread, digits);
#if !PDL
  arrived<HEAD_TILES>();
#endif
  __syncthreads();
  const Column c = column(digits, slice);
#pragma unroll
  for (int i = 0; i < HEAD_TILES; i++) {
#if PDL
    wait_packed(barriers + i);
#else
    if (i == 0) arrived<HEAD_TILES - 1>();
    if (i == 1) arrived<HEAD_TILES - 2>();
    if (i > 1) arrived<0>();
#endif
    const char* mine = memory + i * PACKED<HIDDEN>;
    float y;
    multiply<HIDDEN>(mine + slice * TILE, mine + H_SLICES * TILE, slice, c, y);
    leave(&sums[slice][i * 16], y);
  }
  __syncthreads();
  for (int i = thread; i < HEAD_TILES * 16; i += H_SLICES * 32) {
    const float y = in_order<H_SLICES>(&sums[0][i], HEAD_TILES * 16);
    logits[row + i] = y;
    found[i] = y;
  }
  __syncthreads();
  if (thread < 32) {
    const u32 low = ordered(found[thread]), high = HEAD_TILES > 2 ? ordered(found[(thread + 32) % (HEAD_TILES * 16)]) : 0;
    const u32 top = __reduce_max_sync(ALL, max(low, high));
    const u32 in_low = __ballot_sync(ALL, low == top), in_high = __ballot_sync(ALL, high == top);
    if (thread == 0) {
      best[blockIdx.x] = unordered(top);
      index[blockIdx.x] = (int)row + (in_low ? __ffs(in_low) - 1 : 31 + __ffs(in_high));
    }
  }
}

// The token of the largest logit, the lowest where several are; its embedding; the position moves on.
extern "C" __global__ void __launch_bounds__(1024) next(const float* best, const int* index, int n, Matrix table, float* hidden, float* squares,
                                                        int* position, int* tokens, int limit) {
  __shared__ u32 keys[32], places[32];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  turn<false>();
  u32 key = 0, place = 0xffffffffu;
#pragma unroll 4
  for (int i = thread; i < n; i += 1024) {
    const u32 k = ordered(__ldcg(best + i)), p = __ldcg(index + i);
    if (k > key || (k == key && p < place)) { key = k; place = p; }
  }
  u32 top = __reduce_max_sync(ALL, key);
  place = __reduce_min_sync(ALL, key == top ? place : 0xffffffffu);
  if (lane == 0) { keys[warp] = top; places[warp] = place; }
  __syncthreads();
  top = __reduce_max_sync(ALL, keys[lane]);
  const i64 token = __reduce_min_sync(ALL, keys[lane] == top ? places[lane] : 0xffffffffu);
  if (thread < HIDDEN / 8) {
    const u32 word = ((const u32*)table.codes)[token * (HIDDEN / 8) + thread];
    const i64 group = token * (HIDDEN / 64) + thread / 8;
    const float s = bf16(((const u16*)table.scales)[group]), b = bf16(((const u16*)table.biases)[group]);
    float h[8], square[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      h[i] = (float)((word >> (4 * i)) & 15) * s + b;
      square[i] = h[i] * h[i];
    }
    store(hidden + thread * 8, h);
    const float sum = lanes_tree<2>(tree(square));
    if ((thread & 1) == 0) squares[thread / 2] = sum;
  }
  if (thread == 0) {
    const int at = *position + 1;
    tokens[at % limit] = (int)token;
    *position = at;
  }
}
