// Affine 4-bit, groups of 64, bf16 scales, on AVX-512-VNNI: what affine4.h and affine4_rows.h leave to instruction sets.
#pragma once

#include "affine4.h"

namespace {

constexpr int kTokenBlock = 6;  // tokens of a tile that are multiplied at a time

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
    if (groups & 1) clear_last_group(record, pairs);
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

// Sixteen rows. Codes are read strip by strip of four rows, and prefetched in the order they lie, a strip ahead and a little
// more: of each line's worth of work a part is done while nothing is read (scales, sums), and memory must not rest then.
template <int NT>
MF_INLINE void stream16(const uint8_t* codes, const uint16_t* scales, const uint16_t* biases, int64_t cols,
                        const uint8_t* const* records, float* const* y, int64_t row, int wanted, Upcoming after) {
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
        _mm512_mask_storeu_ps(y[t] + row, __mmask16((1u << wanted) - 1), acc);
    }
}

// --- many tokens ----------------------------------------------------------------------------------------------------

template <int MB>
struct alignas(64) Tile {
    __m512i codes[kTileGroups][16][MB];  // [group][8 dwords of even elements, 8 of odd ones][block of 16 rows]
    float scales[kMaxGroups][MB * 16], biases[kMaxGroups][MB * 16];
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

}  // namespace

#include "affine4_rows.h"
