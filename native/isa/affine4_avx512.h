// Affine 4-bit, groups of 64, bf16 scales: matrix-vector and matrix-matrix on AVX-512-VNNI.
//
// Vector lanes are rows, so nothing is ever summed across lanes in floating point and the order that impl.h states holds
// by itself. Up to four tokens the matrix streams through once, each line of codes unpacked for all of them. Beyond,
// a tile of rows is unpacked once, transposed so that a lane is a row, and used for all tokens.
//
// A token's record: for each pair of groups 128 bytes (32 even elements of the first, 32 of the second, then the odd
// ones), so that unpacking nibbles needs no shuffle; then scales and sums, one float per group each.
#pragma once

namespace {

constexpr int kMaxGroups = int(kMaxCols / 64);
constexpr int kTileGroups = 4;  // groups of a tile that are unpacked at a time; even

MF_INLINE int pairs_of(int64_t cols) { return int(cols / 64 + 1) / 2; }
MF_INLINE const float* record_scales(const uint8_t* record, int pairs) { return (const float*)(record + size_t(pairs) * 128); }
MF_INLINE const float* record_sums(const uint8_t* record, int pairs) { return (const float*)(record + size_t(pairs) * 136); }

void quantize_nibbles(const float* x, int64_t cols, uint8_t* record) {
    const __m128i even_then_odd = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const int groups = int(cols / 64), pairs = pairs_of(cols);
    float* xs = (float*)(record + size_t(pairs) * 128);
    float* xsum = xs + 2 * pairs;
    for (int g = 0; g < groups; ++g) {
        const float* p = x + size_t(g) * 64;
        __m512 v[4];
        __m512 top = _mm512_setzero_ps();
        for (int i = 0; i < 4; ++i) {
            v[i] = _mm512_loadu_ps(p + 16 * i);
            top = _mm512_max_ps(top, _mm512_abs_ps(v[i]));
        }
        const float highest = _mm512_reduce_max_ps(top);
        const __m512 inverse = _mm512_set1_ps(highest > 0 ? 127.0f / highest : 0.0f);
        __m512i sum = _mm512_setzero_si512();
        __m128i q[4];
        for (int i = 0; i < 4; ++i) {
            const __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse));
            sum = _mm512_add_epi32(sum, n);
            q[i] = _mm_shuffle_epi8(_mm512_cvtsepi32_epi8(n), even_then_odd);
        }
        __m128i* out = (__m128i*)(record + size_t(g >> 1) * 128 + (g & 1) * 32);
        _mm_storeu_si128(out, _mm_unpacklo_epi64(q[0], q[1]));
        _mm_storeu_si128(out + 1, _mm_unpacklo_epi64(q[2], q[3]));
        _mm_storeu_si128(out + 4, _mm_unpackhi_epi64(q[0], q[1]));
        _mm_storeu_si128(out + 5, _mm_unpackhi_epi64(q[2], q[3]));
        xs[g] = highest / 127.0f;
        xsum[g] = xs[g] * float(_mm512_reduce_add_epi32(sum));
    }
    if (groups & 1) {
        uint8_t* out = record + size_t(pairs - 1) * 128 + 32;
        memset(out, 0, 32);
        memset(out + 64, 0, 32);
        xs[groups] = xsum[groups] = 0;
    }
}

// The one floating-point step of both paths: lanes are rows.
MF_INLINE __m512 step(__m512 acc, __m512i d, __m512 scale, __m512 bias, float xs, float xsum) {
    acc = _mm512_fmadd_ps(_mm512_mul_ps(scale, _mm512_set1_ps(xs)), _mm512_cvtepi32_ps(d), acc);
    return _mm512_fmadd_ps(bias, _mm512_set1_ps(xsum), acc);
}

// Sixteen rows of sixteen bytes to four vectors: lane r of out[j] is dword j of row r. `keep` masks 16-bit elements.
MF_INLINE void transpose16x4(const uint8_t* p, size_t stride, __mmask8 keep, __m512i out[4]) {
    __m512i z[4];
#pragma GCC unroll 4
    for (int a = 0; a < 4; ++a) {
        const uint8_t* q = p + a * stride;
        __m512i v = _mm512_castsi128_si512(_mm_maskz_loadu_epi16(keep, q));
        v = _mm512_inserti32x4(v, _mm_maskz_loadu_epi16(keep, q + 4 * stride), 1);
        v = _mm512_inserti32x4(v, _mm_maskz_loadu_epi16(keep, q + 8 * stride), 2);
        z[a] = _mm512_inserti32x4(v, _mm_maskz_loadu_epi16(keep, q + 12 * stride), 3);
    }
    const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
    const __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
}

// bf16 [16 rows, groups] to floats out[g * stride + row]. `meanwhile` is called for every eight groups.
template <typename Meanwhile>
MF_INLINE void transpose_scales(const uint16_t* s, int groups, float* out, size_t stride, Meanwhile meanwhile) {
    const __m512i high = _mm512_set1_epi32(int(0xffff0000u));
    for (int g = 0; g < groups; g += 8) {
        meanwhile();
        const int n = groups - g < 8 ? groups - g : 8;
        __m512i o[4];
        transpose16x4((const uint8_t*)(s + g), size_t(groups) * 2, __mmask8((1u << n) - 1), o);
        for (int j = 0; j < 4 && 2 * j < n; ++j) {
            _mm512_storeu_ps(out + size_t(g + 2 * j) * stride, _mm512_castsi512_ps(_mm512_slli_epi32(o[j], 16)));
            if (2 * j + 1 < n)
                _mm512_storeu_ps(out + size_t(g + 2 * j + 1) * stride, _mm512_castsi512_ps(_mm512_and_si512(o[j], high)));
        }
    }
}

// Four rows to one vector: each 128-bit block holds its four lanes' sums of row 0, 1, 2, 3.
MF_INLINE __m512i fold4(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}
// Four folded quads of rows to the dots of both groups of a pair, lane = row.
MF_INLINE void fold16(const __m512i q[4], __m512i& first, __m512i& second) {
    const __m512i ab = _mm512_add_epi32(_mm512_shuffle_i32x4(q[0], q[1], 0x88), _mm512_shuffle_i32x4(q[0], q[1], 0xdd));
    const __m512i cd = _mm512_add_epi32(_mm512_shuffle_i32x4(q[2], q[3], 0x88), _mm512_shuffle_i32x4(q[2], q[3], 0xdd));
    first = _mm512_shuffle_i32x4(ab, cd, 0x88);
    second = _mm512_shuffle_i32x4(ab, cd, 0xdd);
}

// --- few tokens -----------------------------------------------------------------------------------------------------

// What to prefetch while sixteen rows are worked on: nothing, what lies behind them, or the start of other rows.
struct Upcoming {
    const uint8_t *codes = nullptr, *scales = nullptr, *biases = nullptr;  // of the sixteen rows that come next
};

// Sixteen rows. Codes are read strip by strip of four rows, and prefetched in the order they lie, a strip ahead and a little
// more: of each line's worth of work a part is done while nothing is read (scales, sums), and memory must not rest then.
template <int NT>
MF_INLINE void stream16(const uint8_t* codes, const uint16_t* scales, const uint16_t* biases, int64_t cols,
                        const uint8_t* const* records, float* const* y, int64_t row, __mmask16 wanted, Upcoming after) {
    const int groups = int(cols / 64), pairs = pairs_of(cols), full = groups / 2;
    const size_t stride = size_t(cols) / 2, strip = 4 * stride > 2048 ? 4 * stride : 2048;
    size_t ahead = strip + stride;  // of the first of these rows; grows by 2 strides with the scales, 12 in the strips, 2 in the sums
    const auto prefetch = [&](int lines) {
        const uint8_t* next = ahead < 16 * stride ? codes + ahead : after.codes + (ahead - 16 * stride);
        for (int i = 0; i < lines; ++i) _mm_prefetch((const char*)(next + i * 64), _MM_HINT_T0);
        ahead += size_t(lines) * 64;
    };
    const __m512i low4 = _mm512_set1_epi8(15);
    alignas(64) float s[kMaxGroups * 16], b[kMaxGroups * 16];
    alignas(64) __m512i quads[kMaxGroups / 2][NT][4];
    transpose_scales(scales, groups, s, 16, [&] { prefetch(4); });
    transpose_scales(biases, groups, b, 16, [&] { prefetch(4); });
    for (int a = 0; a < 4; ++a) {
        const uint8_t* c = codes + a * 4 * stride;
        // The next sixteen rows' scales (first two strips) and biases (last two), a line every other step.
        const uint8_t* next_scales = (a < 2 ? after.scales : after.biases) + (a & 1) * (pairs / 2) * 64;
        for (int p = 0; p < pairs; ++p) {
            if (!(p & 1)) _mm_prefetch((const char*)(next_scales + p * 32), _MM_HINT_T0);
            const __mmask8 keep = p < full ? 0xff : 0x0f;
            prefetch(3);
            __m512i low[4], high[4];
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) {
                const __m512i v = _mm512_maskz_loadu_epi64(keep, c + r * stride + p * 64);
                low[r] = _mm512_and_si512(v, low4);
                high[r] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low4);
            }
#pragma GCC unroll 4
            for (int t = 0; t < NT; ++t) {
                const __m512i even = _mm512_loadu_si512(records[t] + p * 128), odd = _mm512_loadu_si512(records[t] + p * 128 + 64);
                __m512i v[4];
#pragma GCC unroll 4
                for (int r = 0; r < 4; ++r)
                    v[r] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), low[r], even), high[r], odd);
                quads[p][t][a] = fold4(v[0], v[1], v[2], v[3]);
            }
        }
    }
    for (int t = 0; t < NT; ++t) {
        const float *xs = record_scales(records[t], pairs), *xsum = record_sums(records[t], pairs);
        __m512 acc = _mm512_setzero_ps();
        for (int p = 0; p < pairs; ++p) {
            if (t == 0) prefetch(2);
            __m512i first, second;
            fold16(quads[p][t], first, second);
            acc = step(acc, first, _mm512_load_ps(s + p * 32), _mm512_load_ps(b + p * 32), xs[2 * p], xsum[2 * p]);
            if (__builtin_expect(p < full, 1))
                acc = step(acc, second, _mm512_load_ps(s + p * 32 + 16), _mm512_load_ps(b + p * 32 + 16), xs[2 * p + 1],
                           xsum[2 * p + 1]);
        }
        _mm512_mask_storeu_ps(y[t] + row, wanted, acc);
    }
}

// --- many tokens ----------------------------------------------------------------------------------------------------

template <int MB>
struct alignas(64) Tile {
    __m512i codes[kTileGroups][16][MB];  // [group][8 dwords of even elements, 8 of odd ones][block of 16 rows]
    float scales[kMaxGroups][MB * 16], biases[kMaxGroups][MB * 16];
};

struct alignas(64) Workspace {
    Tile<4> wide;
    Tile<1> narrow;
    alignas(64) float acc[kMostTokens * 64];
    alignas(64) uint8_t codes[16 * kMaxCols / 2];
    alignas(64) uint16_t scales[16 * kMaxGroups], biases[16 * kMaxGroups];
};

// Sixteen rows of one pair of groups into block m of a tile. `half`: only the first group exists.
template <int MB>
MF_INLINE void unpack_pair(const uint8_t* codes, size_t stride, Tile<MB>& tile, int group, int m, bool half) {
    const __m512i low4 = _mm512_set1_epi8(15);
    const __mmask8 keep = half ? 0x0f : 0xff;
    __m512i q[4][4];  // 128-bit block b of q[a][j]: dword 4b + j of rows 4a to 4a + 3
#pragma GCC unroll 4
    for (int a = 0; a < 4; ++a) {
        const uint8_t* p = codes + a * 4 * stride;
        const __m512i r0 = _mm512_maskz_loadu_epi64(keep, p), r1 = _mm512_maskz_loadu_epi64(keep, p + stride);
        const __m512i r2 = _mm512_maskz_loadu_epi64(keep, p + 2 * stride), r3 = _mm512_maskz_loadu_epi64(keep, p + 3 * stride);
        const __m512i x0 = _mm512_unpacklo_epi32(r0, r1), x1 = _mm512_unpackhi_epi32(r0, r1);
        const __m512i x2 = _mm512_unpacklo_epi32(r2, r3), x3 = _mm512_unpackhi_epi32(r2, r3);
        q[a][0] = _mm512_unpacklo_epi64(x0, x2);
        q[a][1] = _mm512_unpackhi_epi64(x0, x2);
        q[a][2] = _mm512_unpacklo_epi64(x1, x3);
        q[a][3] = _mm512_unpackhi_epi64(x1, x3);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512i s0 = _mm512_shuffle_i32x4(q[0][j], q[1][j], 0x44), s1 = _mm512_shuffle_i32x4(q[0][j], q[1][j], 0xee);
        const __m512i s2 = _mm512_shuffle_i32x4(q[2][j], q[3][j], 0x44), s3 = _mm512_shuffle_i32x4(q[2][j], q[3][j], 0xee);
        const __m512i o[4] = {_mm512_shuffle_i32x4(s0, s2, 0x88), _mm512_shuffle_i32x4(s0, s2, 0xdd),
                              _mm512_shuffle_i32x4(s1, s3, 0x88), _mm512_shuffle_i32x4(s1, s3, 0xdd)};
#pragma GCC unroll 4
        for (int b = 0; b < 4; ++b) {  // dword 4b + j of the pair: dword (4b + j) % 8 of group b / 2
            auto& into = tile.codes[group + (b >> 1)];
            const int k = (b & 1) * 4 + j;
            into[k][m] = _mm512_and_si512(o[b], low4);
            into[8 + k][m] = _mm512_and_si512(_mm512_srli_epi16(o[b], 4), low4);
        }
    }
}

// NT tokens times 16 * MB rows times `count` groups of the tile, on top of acc [NT][16 * MB].
template <int MB, int NT>
__attribute__((noinline)) void multiply(const Tile<MB>& tile, int first_group, int count, const uint8_t* const* records,
                                        int pairs, float* __restrict acc, const uint8_t* ahead, int lines) {
    const uint8_t* r[NT];
#pragma GCC unroll 6
    for (int t = 0; t < NT; ++t) r[t] = records[t];
    for (int gl = 0; gl < count; ++gl) {
        const int g = first_group + gl;
        __m512i d[MB][NT];
#pragma GCC unroll 6
        for (int t = 0; t < NT; ++t)
#pragma GCC unroll 4
            for (int m = 0; m < MB; ++m) d[m][t] = _mm512_setzero_si512();
        const __m512i* codes = &tile.codes[gl][0][0];
        size_t at = size_t(g >> 1) * 128 + (g & 1) * 32;
        // Two turns, even and odd elements. Left a loop so that its body stays inside the micro-op cache; the loads and
        // products are pinned in assembly because the compiler otherwise folds the broadcast into each product.
#pragma GCC unroll 1
        for (int turn = 0; turn < 2; ++turn) {
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k) {
                __m512i w[MB];
#pragma GCC unroll 4
                for (int m = 0; m < MB; ++m) asm volatile("vmovdqa64 %1, %0" : "=v"(w[m]) : "m"(codes[k * MB + m]));
#pragma GCC unroll 6
                for (int t = 0; t < NT; ++t) {
                    __m512i x;
                    asm volatile("vpbroadcastd %1, %0" : "=v"(x) : "m"(*(const int32_t*)(r[t] + at + k * 4)));
#pragma GCC unroll 4
                    for (int m = 0; m < MB; ++m) asm volatile("vpdpbusd %2, %1, %0" : "+v"(d[m][t]) : "v"(w[m]), "v"(x));
                }
            }
            codes += 8 * MB;
            at += 64;
        }
        for (int i = 0; i < lines; ++i, ahead += 64) _mm_prefetch((const char*)ahead, _MM_HINT_T1);
        asm volatile("" ::: "memory");  // or the compiler keeps copies of acc in spill slots
        constexpr int kHalf = MB >= 2 ? 2 : 1;  // two row blocks at a time: nothing spills
#pragma GCC unroll 4
        for (int mh = 0; mh < MB; mh += kHalf) {
            __m512 s[kHalf], b[kHalf];
#pragma GCC unroll 2
            for (int m = 0; m < kHalf; ++m) {
                s[m] = _mm512_load_ps(&tile.scales[g][(mh + m) * 16]);
                b[m] = _mm512_load_ps(&tile.biases[g][(mh + m) * 16]);
            }
#pragma GCC unroll 6
            for (int t = 0; t < NT; ++t) {
                const float xs = record_scales(r[t], pairs)[g], xsum = record_sums(r[t], pairs)[g];
#pragma GCC unroll 2
                for (int m = 0; m < kHalf; ++m) {
                    float* a = acc + t * (MB * 16) + (mh + m) * 16;
                    _mm512_store_ps(a, step(_mm512_load_ps(a), d[mh + m][t], s[m], b[m], xs, xsum));
                }
            }
        }
    }
}

// Lines of the rows that come next, spread over the work as prefetches.
struct Ahead {
    const uint8_t* at = nullptr;
    const uint8_t* end = nullptr;
    int lines = 0;  // per group of one block of tokens
};

template <int MB>
__attribute__((noinline)) void multiply_all(const Tile<MB>& tile, int first_group, int count, const uint8_t* const* records,
                                            int tokens, int pairs, float* acc, Ahead& ahead) {
    const int blocks = (tokens + 5) / 6;
    for (int i = 0, t = 0; i < blocks; ++i) {
        const int n = (tokens - t + blocks - i - 1) / (blocks - i);
        float* a = acc + size_t(t) * MB * 16;
        const uint8_t* from = ahead.at;
        const int lines = ahead.at < ahead.end ? ahead.lines : 0;
        ahead.at += size_t(lines) * size_t(count) * 64;
        switch (n) {
            case 1: multiply<MB, 1>(tile, first_group, count, records + t, pairs, a, from, lines); break;
            case 2: multiply<MB, 2>(tile, first_group, count, records + t, pairs, a, from, lines); break;
            case 3: multiply<MB, 3>(tile, first_group, count, records + t, pairs, a, from, lines); break;
            case 4: multiply<MB, 4>(tile, first_group, count, records + t, pairs, a, from, lines); break;
            case 5: multiply<MB, 5>(tile, first_group, count, records + t, pairs, a, from, lines); break;
            default: multiply<MB, 6>(tile, first_group, count, records + t, pairs, a, from, lines); break;
        }
        t += n;
    }
}

template <int MB>
MF_INLINE void tile_rows(const uint8_t* codes, const uint16_t* scales, const uint16_t* biases, int64_t cols,
                         const uint8_t* const* records, int tokens, float* acc, Tile<MB>& tile, Ahead& ahead) {
    const int groups = int(cols / 64), pairs = pairs_of(cols);
    const size_t stride = size_t(cols) / 2;
    memset(acc, 0, size_t(tokens) * MB * 64);
    for (int m = 0; m < MB; ++m) {
        transpose_scales(scales + size_t(m) * 16 * groups, groups, &tile.scales[0][m * 16], MB * 16, [] {});
        transpose_scales(biases + size_t(m) * 16 * groups, groups, &tile.biases[0][m * 16], MB * 16, [] {});
    }
    for (int g = 0; g < groups; g += kTileGroups) {
        const int count = groups - g < kTileGroups ? groups - g : kTileGroups;
        for (int m = 0; m < MB; ++m)
            for (int gl = 0; gl < count; gl += 2)
                unpack_pair<MB>(codes + m * 16 * stride + size_t(g + gl) * 32, stride, tile, gl, m, gl + 1 >= count);
        multiply_all<MB>(tile, g, count, records, tokens, pairs, acc, ahead);
    }
}

// --- a range of rows ------------------------------------------------------------------------------------------------

// The last rows of a matrix, fewer than sixteen, copied so that kernels may read sixteen.
MF_INLINE void copy_tail(const Matrix& m, int64_t row, int n, Workspace& ws) {
    const size_t stride = size_t(m.cols) / 2, groups = size_t(m.cols / 64);
    memset(ws.codes, 0, 16 * stride);
    memset(ws.scales, 0, 32 * groups);
    memset(ws.biases, 0, 32 * groups);
    memcpy(ws.codes, m.weight + size_t(row) * stride, size_t(n) * stride);
    memcpy(ws.scales, m.scales + size_t(row) * groups * 2, size_t(n) * groups * 2);
    memcpy(ws.biases, m.biases + size_t(row) * groups * 2, size_t(n) * groups * 2);
}

template <int NT>
__attribute__((noinline)) void stream_rows(const Matrix& m, const uint8_t* const* records, float* const* y, int64_t first,
                                           int64_t last, Next next, Workspace& ws) {
    const size_t stride = size_t(m.cols) / 2, groups = size_t(m.cols / 64);
    const auto from = [](const Matrix& of, int64_t row) {
        const size_t per_row = size_t(of.cols / 64) * 2;
        return Upcoming{of.weight + size_t(row) * (size_t(of.cols) / 2), of.scales + size_t(row) * per_row,
                        of.biases + size_t(row) * per_row};
    };
    // Prefetching what has just been read is harmless, which is what a range without a successor does.
    const Upcoming end = next.matrix ? from(*next.matrix, next.row) : from(m, first);
    int64_t r = first;
    for (; r + 16 <= last; r += 16)
        stream16<NT>(m.weight + size_t(r) * stride, (const uint16_t*)m.scales + size_t(r) * groups,
                     (const uint16_t*)m.biases + size_t(r) * groups, m.cols, records, y, r, 0xffff,
                     r + 32 <= last ? from(m, r + 16) : end);
    if (r < last) {
        copy_tail(m, r, int(last - r), ws);
        stream16<NT>(ws.codes, ws.scales, ws.biases, m.cols, records, y, r, __mmask16((1u << (last - r)) - 1), end);
    }
}

void multiply_rows(const Matrix& m, const uint8_t* const* records, int tokens, float* const* y, int64_t first, int64_t last,
                   Next next, Workspace& ws) {
    const size_t stride = size_t(m.cols) / 2, groups = size_t(m.cols / 64);
    const size_t units = groups * size_t((tokens + 5) / 6);  // steps of a tile
    // The tile behind a row, or behind the range: its codes step by step, its scales, which are few, at once.
    const auto expect = [units](const Matrix& of, int64_t row) {
        const size_t bytes = 64 * size_t(of.cols) / 2, per_row = size_t(of.cols / 64) * 2;
        for (size_t i = 0; i < 64 * per_row; i += 64) {
            _mm_prefetch((const char*)(of.scales + size_t(row) * per_row + i), _MM_HINT_T1);
            _mm_prefetch((const char*)(of.biases + size_t(row) * per_row + i), _MM_HINT_T1);
        }
        const uint8_t* codes = of.weight + size_t(row) * size_t(of.cols) / 2;
        return Ahead{codes, codes + bytes, int((bytes / 64 + units - 1) / units)};
    };
    int64_t r = first;
    for (; r + 64 <= last; r += 64) {
        const uint8_t* codes = m.weight + size_t(r) * stride;
        Ahead ahead;
        if (r + 128 <= last) ahead = expect(m, r + 64);
        else if (next.matrix && next.row + 64 <= next.matrix->rows) ahead = expect(*next.matrix, next.row);
        tile_rows<4>(codes, (const uint16_t*)m.scales + size_t(r) * groups, (const uint16_t*)m.biases + size_t(r) * groups,
                     m.cols, records, tokens, ws.acc, ws.wide, ahead);
        for (int t = 0; t < tokens; ++t)
            for (int b = 0; b < 4; ++b) _mm512_storeu_ps(y[t] + r + b * 16, _mm512_load_ps(ws.acc + t * 64 + b * 16));
    }
    for (; r < last; r += 16) {
        const int n = last - r < 16 ? int(last - r) : 16;
        const uint8_t* codes = m.weight + size_t(r) * stride;
        const uint16_t *s = (const uint16_t*)m.scales + size_t(r) * groups, *b = (const uint16_t*)m.biases + size_t(r) * groups;
        if (n < 16) {
            copy_tail(m, r, n, ws);
            codes = ws.codes;
            s = ws.scales;
            b = ws.biases;
        }
        Ahead none;
        tile_rows<1>(codes, s, b, m.cols, records, tokens, ws.acc, ws.narrow, none);
        for (int t = 0; t < tokens; ++t)
            _mm512_mask_storeu_ps(y[t] + r, __mmask16((1u << n) - 1), _mm512_load_ps(ws.acc + t * 16));
    }
}

void rows_nibbles(const Matrix& m, const uint8_t* const* records, int64_t tokens, float* const* y, int64_t first,
                  int64_t last, Next next, Workspace& ws) {
    switch (tokens) {
        case 0: return;
        case 1: return stream_rows<1>(m, records, y, first, last, next, ws);
        case 2: return stream_rows<2>(m, records, y, first, last, next, ws);
        case 3: return stream_rows<3>(m, records, y, first, last, next, ws);
        case 4: return stream_rows<4>(m, records, y, first, last, next, ws);
    }
    multiply_rows(m, records, int(tokens), y, first, last, next, ws);
}

}  // namespace
