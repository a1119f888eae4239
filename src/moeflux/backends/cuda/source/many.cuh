// Many rows of activations times coded weights, on integer tensor cores: the bits of one row alone.
//
// A block takes 256 rows of a matrix (128 of 8 bits) and up to 64 tokens, a warp 16 rows and all of the tokens. 256 inputs
// are fetched while those before are multiplied, across the end of one piece of work into the next.
#pragma once
#include "tile.cuh"

extern __shared__ __align__(128) char memory[];

#ifndef BLOCK_TOKENS
#define BLOCK_TOKENS 64
#endif
template <int BITS>
constexpr int WARPS = BITS == 4 ? 16 : 8;
template <int BITS>
constexpr int PARTS = 1;  // of 16 rows, for each warp
constexpr int TOKEN_BYTES = 512 + 64;                 // digits of 256 inputs; the rest keeps neighbours in other banks
constexpr int GROUP_BYTES = BLOCK_TOKENS * 8;         // step and mass of one group for all tokens
template <int BITS>
constexpr int ROW_BYTES = BITS * 32 + 32;
template <int BITS>
constexpr int WEIGHT_BYTES = PARTS<BITS> * (16 * ROW_BYTES<BITS> + 256);
template <int BITS>
constexpr int STAGE = BLOCK_TOKENS * TOKEN_BYTES + 4 * GROUP_BYTES + WARPS<BITS> * WEIGHT_BYTES<BITS>;

// Activations as integers. Of each token and group 128 bytes: high, then low digits, each as four parts of 16 inputs, in a part
// even places first; and per group its step and the sum of its activations.
struct Activations {
  const char* digits;
  const float2* groups;
};

// What is multiplied: `experts` matrices of `rows` rows, each with the tokens between two edges; places of the tokens among the
// activations in `token` (none: all in order).
struct Work {
  const int *edges, *token;
  int experts, rows, strips;
};

struct Plan {
  int edges[MOST_EXPERTS + 1];
  int turns[MOST_EXPERTS + 1];  // of BLOCK_TOKENS or fewer: how many before each matrix

  DEVICE void make(const Work& w) {
    for (int i = threadIdx.x; i <= w.experts; i += blockDim.x) edges[i] = w.edges[i];
    __syncthreads();
    if (threadIdx.x < 32) {
      const int each = (w.experts + 31) / 32, first = threadIdx.x * each;
      int mine = 0;
      for (int i = first; i < min(first + each, w.experts); i++) mine += (edges[i + 1] - edges[i] + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
      int sum = mine;
#pragma unroll
      for (int i = 1; i < 32; i <<= 1) {
        const int before = __shfl_up_sync(ALL, sum, i);
        if (threadIdx.x >= i) sum += before;
      }
      sum -= mine;
      for (int i = first; i < min(first + each, w.experts); i++) {
        turns[i] = sum;
        sum += (edges[i + 1] - edges[i] + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        if (i == w.experts - 1) turns[w.experts] = sum;
      }
    }
    __syncthreads();
  }
};

// One piece: a strip of rows of one matrix, and some of its tokens.
struct Piece {
  int item, expert, row, first, count;

  DEVICE bool find(const Work& w, const Plan& plan, int strip) {
    const int turn = item / w.strips;
    if (turn >= plan.turns[w.experts]) return false;
    int low = 0, high = w.experts;  // the last matrix that begins at this turn or before
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (plan.turns[middle] <= turn) low = middle;
      else high = middle;
    }
    while (plan.turns[low + 1] <= turn) low++;
    const int from = plan.edges[low], to = plan.edges[low + 1], n = plan.turns[low + 1] - plan.turns[low];
    const int each = ((to - from + 7) / 8 + n - 1) / n * 8;
    expert = low;
    row = item % w.strips * strip;
    first = from + (turn - plan.turns[low]) * each;
    count = max(0, min(each, to - first));
    return true;
  }
};

template <int N, int BITS>
DEVICE void fetch_piece(char* stage, const Work& w, const Piece& p, const Matrix& m, const Activations& x, int block) {
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const u32 to = shared_address(stage);
  // Digits: 32 threads for each token, all of its 512 bytes; step and mass: four groups of 8 bytes.
  for (int i = warp; i < p.count; i += WARPS<BITS>) {
    const int token = w.token ? w.token[p.first + i] : p.first + i;
    copy16(to + i * TOKEN_BYTES + lane * 16, x.digits + (i64)token * (2 * N) + block * 512 + lane * 16);
    if (lane < 4) copy8(to + BLOCK_TOKENS * TOKEN_BYTES + lane * GROUP_BYTES + i * 8, x.groups + (i64)token * (N / 64) + block * 4 + lane);
  }
#pragma unroll
  for (int part = 0; part < PARTS<BITS>; part++) {
    const int row = p.row + (warp * PARTS<BITS> + part) * 16;
    if (row < w.rows) {
      const u32 mine = to + BLOCK_TOKENS * TOKEN_BYTES + 4 * GROUP_BYTES + warp * WEIGHT_BYTES<BITS> + part * (16 * ROW_BYTES<BITS> + 256);
      constexpr int CHUNKS = BITS * 2;  // of 16 bytes in a row
#pragma unroll
      for (int i = lane; i < 16 * CHUNKS; i += 32)
        copy16(mine + i / CHUNKS * ROW_BYTES<BITS> + i % CHUNKS * 16, m.codes + (i64)(row + i / CHUNKS) * (N * BITS / 8) + block * (BITS * 32) + i % CHUNKS * 16);
      copy8(mine + 16 * ROW_BYTES<BITS> + (lane & 15) * 16 + (lane >> 4) * 8,
            (lane < 16 ? m.scales : m.biases) + ((i64)(row + (lane & 15)) * (N / 64) + block * 4) * 2);
    }
  }
}

// Codes of one group for rows g and g + 8 as bytes: those at even and at odd places, each 32 for one product.
template <int BITS>
DEVICE void unpack(u32 (&even)[4], u32 (&odd)[4], const char* row, const char* other, int group) {
  const int t = threadIdx.x & 3;
  if constexpr (BITS == 4) {
    const uint2 a = *(const uint2*)(row + group * 32 + t * 8), b = *(const uint2*)(other + group * 32 + t * 8);
    even[0] = a.x & 0x0f0f0f0fu; even[1] = b.x & 0x0f0f0f0fu; even[2] = a.y & 0x0f0f0f0fu; even[3] = b.y & 0x0f0f0f0fu;
    odd[0] = (a.x >> 4) & 0x0f0f0f0fu; odd[1] = (b.x >> 4) & 0x0f0f0f0fu; odd[2] = (a.y >> 4) & 0x0f0f0f0fu; odd[3] = (b.y >> 4) & 0x0f0f0f0fu;
  } else {
    const uint4 a = *(const uint4*)(row + group * 64 + t * 16), b = *(const uint4*)(other + group * 64 + t * 16);
    even[0] = __byte_perm(a.x, a.y, 0x6420); even[1] = __byte_perm(b.x, b.y, 0x6420); even[2] = __byte_perm(a.z, a.w, 0x6420); even[3] = __byte_perm(b.z, b.w, 0x6420);
    odd[0] = __byte_perm(a.x, a.y, 0x7531); odd[1] = __byte_perm(b.x, b.y, 0x7531); odd[2] = __byte_perm(a.z, a.w, 0x7531); odd[3] = __byte_perm(b.z, b.w, 0x7531);
  }
}

constexpr int N_TILES = BLOCK_TOKENS / 8;

// Four groups onto acc: tokens 2t and 2t + 1 of each tile of eight, rows g and g + 8 of each part.
template <int BITS>
DEVICE void multiply_piece(float (&acc)[PARTS<BITS>][N_TILES][4], const char* stage, int tiles) {
  constexpr int P = PARTS<BITS>;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const char* weights = stage + BLOCK_TOKENS * TOKEN_BYTES + 4 * GROUP_BYTES + warp * WEIGHT_BYTES<BITS>;
  u32 even[P][4][4], odd[P][4][4];
  float s[P][4][2], b[P][4][2];
#pragma unroll
  for (int p = 0; p < P; p++) {
    const char* rows = weights + p * (16 * ROW_BYTES<BITS> + 256);
    const u16* scale = (const u16*)(rows + 16 * ROW_BYTES<BITS>) + g * 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      unpack<BITS>(even[p][i], odd[p][i], rows + g * ROW_BYTES<BITS>, rows + (g + 8) * ROW_BYTES<BITS>, i);
      s[p][i][0] = bf16(scale[i]); s[p][i][1] = bf16(scale[64 + i]);
      b[p][i][0] = bf16(scale[4 + i]); b[p][i][1] = bf16(scale[68 + i]);
    }
  }
  const char* digits = stage + g * TOKEN_BYTES + t * 16;
  const char* groups = stage + BLOCK_TOKENS * TOKEN_BYTES + t * 16;
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
    if (n < tiles) {
      float sum[P][2][4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint4 h = *(const uint4*)(digits + n * 8 * TOKEN_BYTES + i * 128), l = *(const uint4*)(digits + n * 8 * TOKEN_BYTES + i * 128 + 64);
        const float4 v = *(const float4*)(groups + i * GROUP_BYTES + n * 64);  // step and mass of both tokens
#pragma unroll
        for (int p = 0; p < P; p++) {
          int high[4] = {0, 0, 0, 0}, low[4] = {0, 0, 0, 0};
          product(high, even[p][i][0], even[p][i][1], even[p][i][2], even[p][i][3], h.x, h.y);
          product(low, even[p][i][0], even[p][i][1], even[p][i][2], even[p][i][3], l.x, l.y);
          product(high, odd[p][i][0], odd[p][i][1], odd[p][i][2], odd[p][i][3], h.z, h.w);
          product(low, odd[p][i][0], odd[p][i][1], odd[p][i][2], odd[p][i][3], l.z, l.w);
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const float step = j & 1 ? v.z : v.x, mass = j & 1 ? v.w : v.y;
            const float found = fmaf(s[p][i][j >> 1] * step, (float)(high[j] * 256 + low[j]), b[p][i][j >> 1] * mass);
            if (i & 1) sum[p][i >> 1][j] = sum[p][i >> 1][j] + found;
            else sum[p][i >> 1][j] = found;
          }
        }
      }
#pragma unroll
      for (int p = 0; p < P; p++)
#pragma unroll
        for (int j = 0; j < 4; j++) acc[p][n][j] = acc[p][n][j] + (sum[p][0][j] + sum[p][1][j]);
    }
  }
}

// All of the work, by a grid that stays. `matrix(piece)`: whose rows it counts. `write(place, row, y)`.
template <int N, int BITS, typename MatrixOf, typename Write>
DEVICE void multiply_many(const Work& w, const Activations& x, MatrixOf matrix, Write write) {
  __shared__ Plan plan;
  plan.make(w);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  constexpr int BLOCKS = N / 256, P = PARTS<BITS>, STRIP = WARPS<BITS> * P * 16;
  Piece now, next;
  now.item = blockIdx.x;
  if (!now.find(w, plan, STRIP)) return;
  fetch_piece<N, BITS>(memory, w, now, matrix(now), x, 0);
  commit();
  int stage = 0;
  bool more = true;
  while (more) {
    float acc[P][N_TILES][4];
#pragma unroll
    for (int p = 0; p < P; p++)
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) acc[p][n][j] = 0.f;
    const int tiles = (now.count + 7) / 8, row = now.row + warp * P * 16;
#pragma unroll 1
    for (int block = 0; block < BLOCKS; block++) {
      if (block + 1 < BLOCKS) {
        fetch_piece<N, BITS>(memory + (stage ^ 1) * STAGE<BITS>, w, now, matrix(now), x, block + 1);
      } else {
        next = now;
        next.item += gridDim.x;
        more = next.find(w, plan, STRIP);
        if (more) fetch_piece<N, BITS>(memory + (stage ^ 1) * STAGE<BITS>, w, next, matrix(next), x, 0);
      }
      commit();
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      __syncthreads();
      if (row < w.rows) multiply_piece<BITS>(acc, memory + stage * STAGE<BITS>, tiles);
      __syncthreads();
      stage ^= 1;
    }
#pragma unroll
    for (int p = 0; p < P; p++)
      if (row + p * 16 < w.rows)
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
          if (n < tiles)
#pragma unroll
            for (int j = 0; j < 4; j++) {
              const int i = n * 8 + 2 * t + (j & 1);
              if (i < now.count) write(now.first + i, row + p * 16 + g + (j >> 1) * 8, acc[p][n][j]);
            }
    now = next;
  }
}
