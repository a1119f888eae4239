// Affine 4-bit, groups of 64, bf16 scales, on AVX2: what affine4.h and affine4_rows.h leave to instruction sets. With
// AVX-VNNI, four products are added in one instruction; without, pairs are added in 16 bits, which hold eight of them:
// 8 * 2 * 15 * 127 < 2^15.
#pragma once

#include "affine4.h"

namespace {

#if defined(__AVXVNNI__)
constexpr int kTokenBlock = 6;  // tokens of a tile that are multiplied at a time
#else
constexpr int kTokenBlock = 5;
#endif

void quantize_nibbles(const float* x, int64_t cols, uint8_t* record) {
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i even_then_odd = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,  //
                                                   0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const int groups = int(cols / 64), pairs = pairs_of(cols);
    float* xs = (float*)(record + size_t(pairs) * 128);
    float* xsum = xs + 2 * pairs;
    for (int g = 0; g < groups; ++g) {
        const float* p = x + size_t(g) * 64;
        __m256 top = _mm256_setzero_ps();
        for (int i = 0; i < 8; ++i) top = _mm256_max_ps(top, _mm256_andnot_ps(sign, _mm256_loadu_ps(p + 8 * i)));
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        const float highest = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
        const __m256 inverse = _mm256_set1_ps(highest > 0 ? 127.0f / highest : 0.0f);
        __m256i sum = _mm256_setzero_si256();
        uint8_t* out = record + size_t(g >> 1) * 128 + (g & 1) * 32;
        for (int half = 0; half < 2; ++half) {
            __m256i n[4];
            for (int i = 0; i < 4; ++i) {
                n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(p + half * 32 + 8 * i), inverse));
                sum = _mm256_add_epi32(sum, n[i]);
            }
            const __m256i q = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
            const __m256i split = _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(q, in_order), even_then_odd);
            const __m256i apart = _mm256_permute4x64_epi64(split, 0xd8);
            _mm_storeu_si128((__m128i*)(out + half * 16), _mm256_castsi256_si128(apart));
            _mm_storeu_si128((__m128i*)(out + 64 + half * 16), _mm256_extracti128_si256(apart, 1));
        }
        __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
        s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
        xs[g] = highest / 127.0f;
        xsum[g] = xs[g] * float(_mm_cvtsi128_si32(s));
    }
    if (groups & 1) clear_last_group(record, pairs);
}

// The one floating-point step of both paths: lanes are rows.
MF_INLINE __m256 step(__m256 acc, __m256i d, __m256 scale, __m256 bias, float xs, float xsum) {
    acc = _mm256_fmadd_ps(_mm256_mul_ps(scale, _mm256_set1_ps(xs)), _mm256_cvtepi32_ps(d), acc);
    return _mm256_fmadd_ps(bias, _mm256_set1_ps(xsum), acc);
}

// Eight rows of so many 16-bit elements, at most eight, to four vectors: lane r of out[j] is dword j of row r.
MF_INLINE void transpose8x4(const uint16_t* p, size_t stride, int n, __m256i out[4]) {
    __m256i z[4];
    alignas(16) uint16_t tails[8][8] = {};
    if (n < 8)
        for (int r = 0; r < 8; ++r) memcpy(tails[r], p + r * stride, size_t(n) * 2);
    const auto row = [&](int r) { return _mm_loadu_si128((const __m128i*)(n < 8 ? tails[r] : p + r * stride)); };
#pragma GCC unroll 4
    for (int a = 0; a < 4; ++a) z[a] = _mm256_inserti128_si256(_mm256_castsi128_si256(row(a)), row(a + 4), 1);
    const __m256i a = _mm256_unpacklo_epi32(z[0], z[1]), b = _mm256_unpackhi_epi32(z[0], z[1]);
    const __m256i c = _mm256_unpacklo_epi32(z[2], z[3]), d = _mm256_unpackhi_epi32(z[2], z[3]);
    out[0] = _mm256_unpacklo_epi64(a, c);
    out[1] = _mm256_unpackhi_epi64(a, c);
    out[2] = _mm256_unpacklo_epi64(b, d);
    out[3] = _mm256_unpackhi_epi64(b, d);
}

// bf16 [16 rows, groups] to floats out[g * stride + row]. `meanwhile` is called for every eight groups.
template <typename Meanwhile>
MF_INLINE void transpose_scales(const uint16_t* s, int groups, float* out, size_t stride, Meanwhile meanwhile) {
    const __m256i high = _mm256_set1_epi32(int(0xffff0000u));
    for (int g = 0; g < groups; g += 8) {
        meanwhile();
        const int n = groups - g < 8 ? groups - g : 8;
        for (int eight = 0; eight < 16; eight += 8) {
            __m256i o[4];
            transpose8x4(s + g + size_t(eight) * size_t(groups), size_t(groups), n, o);
            float* to = out + size_t(g) * stride + eight;
            for (int j = 0; j < 4 && 2 * j < n; ++j) {
                _mm256_storeu_ps(to + size_t(2 * j) * stride, _mm256_castsi256_ps(_mm256_slli_epi32(o[j], 16)));
                if (2 * j + 1 < n)
                    _mm256_storeu_ps(to + size_t(2 * j + 1) * stride, _mm256_castsi256_ps(_mm256_and_si256(o[j], high)));
            }
        }
    }
}

// Four rows to one vector: each 128-bit block holds its four lanes' sums of row 0, 1, 2, 3.
MF_INLINE __m256i fold4(__m256i a, __m256i b, __m256i c, __m256i d) {
    const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    const __m256i cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}
// Two folded quads of rows to the dots of eight rows, lane = row.
MF_INLINE __m256i fold8(__m256i first, __m256i second) {
    return _mm256_add_epi32(_mm256_permute2x128_si256(first, second, 0x20), _mm256_permute2x128_si256(first, second, 0x31));
}

// A group of one row with one token, in eight parts.
MF_INLINE __m256i dot_nibbles(__m256i low, __m256i high, __m256i even, __m256i odd) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), low, even), high, odd);
#else
    const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low, even), _mm256_maddubs_epi16(high, odd));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

// --- few tokens -----------------------------------------------------------------------------------------------------

// Sixteen rows, as the AVX-512 kernel reads and prefetches them: codes strip by strip of four rows, in the order they lie.
template <int NT>
MF_INLINE void stream16(const uint8_t* codes, const uint16_t* scales, const uint16_t* biases, int64_t cols,
                        const uint8_t* const* records, float* const* y, int64_t row, int wanted, Upcoming after) {
    const int groups = int(cols / 64), pairs = pairs_of(cols);
    const size_t stride = size_t(cols) / 2, strip = 4 * stride > 2048 ? 4 * stride : 2048;
    size_t ahead = strip + stride;  // of the first of these rows; grows by 2 strides with the scales, 12 in the strips, 2 in the sums
    const auto prefetch = [&](int lines) {
        const uint8_t* next = ahead < 16 * stride ? codes + ahead : after.codes + (ahead - 16 * stride);
        for (int i = 0; i < lines; ++i) _mm_prefetch((const char*)(next + i * 64), _MM_HINT_T0);
        ahead += size_t(lines) * 64;
    };
    const __m256i low4 = _mm256_set1_epi8(15);
    alignas(32) float s[kMaxGroups * 16], b[kMaxGroups * 16];
    alignas(32) __m256i quads[kMaxGroups][NT][4];
    transpose_scales(scales, groups, s, 16, [&] { prefetch(4); });
    transpose_scales(biases, groups, b, 16, [&] { prefetch(4); });
    for (int a = 0; a < 4; ++a) {
        const uint8_t* c = codes + a * 4 * stride;
        // The next sixteen rows' scales (first two strips) and biases (last two), a line every other step.
        const uint8_t* next_scales = (a < 2 ? after.scales : after.biases) + (a & 1) * (pairs / 2) * 64;
        for (int g = 0; g < groups; ++g) {
            if (!(g & 3)) _mm_prefetch((const char*)(next_scales + g * 16), _MM_HINT_T0);
            if (!(g & 1)) prefetch(3);
            __m256i low[4], high[4];
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) {
                const __m256i v = _mm256_loadu_si256((const __m256i*)(c + r * stride + g * 32));
                low[r] = _mm256_and_si256(v, low4);
                high[r] = _mm256_and_si256(_mm256_srli_epi16(v, 4), low4);
            }
            const size_t at = size_t(g >> 1) * 128 + (g & 1) * 32;
#pragma GCC unroll 4
            for (int t = 0; t < NT; ++t) {
                const __m256i even = _mm256_loadu_si256((const __m256i*)(records[t] + at));
                const __m256i odd = _mm256_loadu_si256((const __m256i*)(records[t] + at + 64));
                __m256i v[4];
#pragma GCC unroll 4
                for (int r = 0; r < 4; ++r) v[r] = dot_nibbles(low[r], high[r], even, odd);
                quads[g][t][a] = fold4(v[0], v[1], v[2], v[3]);
            }
        }
    }
    for (int t = 0; t < NT; ++t) {
        const float *xs = record_scales(records[t], pairs), *xsum = record_sums(records[t], pairs);
        __m256 first = _mm256_setzero_ps(), second = _mm256_setzero_ps();
        for (int g = 0; g < groups; ++g) {
            if (t == 0 && !(g & 1)) prefetch(2);
            const __m256i* q = quads[g][t];
            const float *sg = s + g * 16, *bg = b + g * 16;
            first = step(first, fold8(q[0], q[1]), _mm256_load_ps(sg), _mm256_load_ps(bg), xs[g], xsum[g]);
            second = step(second, fold8(q[2], q[3]), _mm256_load_ps(sg + 8), _mm256_load_ps(bg + 8), xs[g], xsum[g]);
        }
        if (wanted == 16) {
            _mm256_storeu_ps(y[t] + row, first);
            _mm256_storeu_ps(y[t] + row + 8, second);
        } else {
            alignas(32) float some[16];
            _mm256_store_ps(some, first);
            _mm256_store_ps(some + 8, second);
            memcpy(y[t] + row, some, size_t(wanted) * sizeof(float));
        }
    }
}

// --- many tokens ----------------------------------------------------------------------------------------------------

template <int MB>
struct alignas(64) Tile {
    __m256i codes[kTileGroups][MB][16][2];  // [group][block of 16 rows][8 dwords of even elements, 8 of odd ones][half of the rows]
    float scales[kMaxGroups][MB * 16], biases[kMaxGroups][MB * 16];
};

// Sixteen rows of one pair of groups into block m of a tile. `half`: only the first group exists.
template <int MB>
MF_INLINE void unpack_pair(const uint8_t* codes, size_t stride, Tile<MB>& tile, int group, int m, bool half) {
    const __m256i low4 = _mm256_set1_epi8(15);
    for (int g = 0; g < (half ? 1 : 2); ++g)
        for (int eight = 0; eight < 2; ++eight) {
            __m256i q[2][4];  // 128-bit block b of q[a][j]: dword 4b + j of rows 4a to 4a + 3
#pragma GCC unroll 2
            for (int a = 0; a < 2; ++a) {
                const uint8_t* p = codes + g * 32 + size_t(eight * 8 + a * 4) * stride;
                const auto row = [&](int r) { return _mm256_loadu_si256((const __m256i*)(p + size_t(r) * stride)); };
                const __m256i x0 = _mm256_unpacklo_epi32(row(0), row(1)), x1 = _mm256_unpackhi_epi32(row(0), row(1));
                const __m256i x2 = _mm256_unpacklo_epi32(row(2), row(3)), x3 = _mm256_unpackhi_epi32(row(2), row(3));
                q[a][0] = _mm256_unpacklo_epi64(x0, x2);
                q[a][1] = _mm256_unpackhi_epi64(x0, x2);
                q[a][2] = _mm256_unpacklo_epi64(x1, x3);
                q[a][3] = _mm256_unpackhi_epi64(x1, x3);
            }
            auto& into = tile.codes[group + g][m];
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const __m256i o[2] = {_mm256_permute2x128_si256(q[0][j], q[1][j], 0x20),
                                      _mm256_permute2x128_si256(q[0][j], q[1][j], 0x31)};
#pragma GCC unroll 2
                for (int b = 0; b < 2; ++b) {
                    into[4 * b + j][eight] = _mm256_and_si256(o[b], low4);
                    into[8 + 4 * b + j][eight] = _mm256_and_si256(_mm256_srli_epi16(o[b], 4), low4);
                }
            }
        }
}

// Four elements of sixteen rows with those of one token, on top of its sums. In assembly, because the compiler otherwise loads
// for all tokens at once and spills.
MF_INLINE void multiply_four(const uint8_t* x, __m256i w0, __m256i w1, __m256i& sum0, __m256i& sum1) {
    __m256i four;
#if defined(__AVXVNNI__)
    asm volatile(
        "vpbroadcastd %[x], %[four]\n %{vex%} vpdpbusd %[four], %[w0], %[sum0]\n %{vex%} vpdpbusd %[four], %[w1], %[sum1]"
        : [sum0] "+x"(sum0), [sum1] "+x"(sum1), [four] "=&x"(four)
        : [w0] "x"(w0), [w1] "x"(w1), [x] "m"(*(const int32_t*)x));
#else
    __m256i pairs;
    asm volatile(
        "vpbroadcastd %[x], %[four]\n vpmaddubsw %[four], %[w0], %[pairs]\n vpmaddubsw %[four], %[w1], %[four]\n"
        "vpaddw %[pairs], %[sum0], %[sum0]\n vpaddw %[four], %[sum1], %[sum1]"
        : [sum0] "+x"(sum0), [sum1] "+x"(sum1), [four] "=&x"(four), [pairs] "=&x"(pairs)
        : [w0] "x"(w0), [w1] "x"(w1), [x] "m"(*(const int32_t*)x));
#endif
}

// The dots of sixteen rows with NT tokens over a group, from where its even elements are in their records.
template <int NT>
MF_INLINE void multiply_group(const __m256i (*codes)[2], const uint8_t* const* records, __m256i (&d)[NT][2]) {
    const uint8_t* r[NT];
    for (int t = 0; t < NT; ++t) r[t] = records[t];
#pragma GCC unroll 1
    for (int half = 0; half < 2; ++half) {  // even elements, odd ones
        __m256i sum[NT][2];
#pragma GCC unroll 6
        for (int t = 0; t < NT; ++t) sum[t][0] = sum[t][1] = _mm256_setzero_si256();
#pragma GCC unroll 1
        for (int k = 0; k < 8; ++k, ++codes) {
            const __m256i w0 = codes[0][0], w1 = codes[0][1];
#pragma GCC unroll 6
            for (int t = 0; t < NT; ++t) multiply_four(r[t] + k * 4, w0, w1, sum[t][0], sum[t][1]);
        }
#pragma GCC unroll 6
        for (int t = 0; t < NT; ++t) {
            r[t] += 64;
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h) {
#if !defined(__AVXVNNI__)
                sum[t][h] = _mm256_madd_epi16(sum[t][h], _mm256_set1_epi16(1));
#endif
                d[t][h] = half ? _mm256_add_epi32(d[t][h], sum[t][h]) : sum[t][h];
            }
        }
    }
}

// NT tokens times 16 * MB rows times `count` groups of the tile, on top of acc [NT][16 * MB].
template <int MB, int NT>
__attribute__((noinline)) void multiply(const Tile<MB>& tile, int first_group, int count, const uint8_t* const* records,
                                        int pairs, float* __restrict acc, const uint8_t* ahead, int lines) {
    for (int gl = 0; gl < count; ++gl) {
        const int g = first_group + gl;
        const uint8_t* r[NT];
        for (int t = 0; t < NT; ++t) r[t] = records[t] + size_t(g >> 1) * 128 + (g & 1) * 32;
        for (int i = 0; i < lines; ++i, ahead += 64) _mm_prefetch((const char*)ahead, _MM_HINT_T1);
#pragma GCC unroll 1
        for (int m = 0; m < MB; ++m) {
            alignas(32) __m256i d[NT][2];
            multiply_group<NT>(tile.codes[gl][m], r, d);
            asm volatile("" ::: "memory");  // or the compiler keeps copies of acc in spill slots
            const float *s = &tile.scales[g][m * 16], *b = &tile.biases[g][m * 16];
#pragma GCC unroll 6
            for (int t = 0; t < NT; ++t) {
                const float xs = record_scales(records[t], pairs)[g], xsum = record_sums(records[t], pairs)[g];
#pragma GCC unroll 2
                for (int h = 0; h < 2; ++h) {
                    float* a = acc + t * (MB * 16) + m * 16 + h * 8;
                    _mm256_store_ps(a, step(_mm256_load_ps(a), d[t][h], _mm256_load_ps(s + h * 8), _mm256_load_ps(b + h * 8), xs, xsum));
                }
            }
        }
    }
}

}  // namespace

#include "affine4_rows.h"
