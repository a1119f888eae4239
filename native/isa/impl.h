// The kernels, written once over vec.h and compiled for each instruction set. Included by isa/*.cpp only.
#pragma once

#include <type_traits>

#include "../kernels.h"
#include "../vec.h"

namespace {

using namespace moeflux;

MF_INLINE int64_t lower(int64_t a, int64_t b) { return a < b ? a : b; }

// --- floats ---------------------------------------------------------------------------------------------------------

// Four chains of sixteen lanes over the vector, then one fixed tree.
float dot(const float* a, const float* b, int64_t n) {
    V s0 = vset(0), s1 = vset(0), s2 = vset(0), s3 = vset(0);
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        s0 = vfma(vload(a + i), vload(b + i), s0);
        s1 = vfma(vload(a + i + 16), vload(b + i + 16), s1);
        s2 = vfma(vload(a + i + 32), vload(b + i + 32), s2);
        s3 = vfma(vload(a + i + 48), vload(b + i + 48), s3);
    }
    for (; i < n; i += 16) {
        const int m = int(lower(16, n - i));
        s0 = vfma(vload_n(a + i, m), vload_n(b + i, m), s0);
    }
    return vsum(vadd(vadd(s0, s1), vadd(s2, s3)));
}

template <class F>
MF_INLINE void each(int64_t n, float* y, F&& f) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) vstore(y + i, f(i, 16));
    if (i < n) vstore_n(y + i, f(i, int(n - i)), int(n - i));
}

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* y) {
    const float scale = 1.0f / sqrtf(dot(x, x, n) / float(n) + eps);
    const V s = vset(scale);
    each(n, y, [&](int64_t i, int m) { return vmul(vmul(vload_n(x + i, m), s), vload_n(weight + i, m)); });
}
void add(const float* a, const float* b, int64_t n, float* y) {
    each(n, y, [&](int64_t i, int m) { return vadd(vload_n(a + i, m), vload_n(b + i, m)); });
}
void axpy(float w, const float* x, int64_t n, float* y) {
    const V v = vset(w);
    each(n, y, [&](int64_t i, int m) { return vfma(v, vload_n(x + i, m), vload_n(y + i, m)); });
}
void silu_mul(const float* gate, const float* up, int64_t n, float* y) {
    each(n, y, [&](int64_t i, int m) { return vmul(vsilu(vload_n(gate + i, m)), vload_n(up + i, m)); });
}
void sigmoid(const float* x, int64_t n, float* y) {
    each(n, y, [&](int64_t i, int m) { return vsigmoid(vload_n(x + i, m)); });
}
void sigmoid_mul(const float* gate, int64_t n, float* y) {
    each(n, y, [&](int64_t i, int m) { return vmul(vload_n(y + i, m), vsigmoid(vload_n(gate + i, m))); });
}
void softmax(float* x, int64_t n) {
    float top = x[0];
    for (int64_t i = 1; i < n; ++i) top = x[i] > top ? x[i] : top;
    const V t = vset(top);
    each(n, x, [&](int64_t i, int m) { return vexp(vsub(vload_n(x + i, m), t)); });
    V sum = vset(0);
    for (int64_t i = 0; i < n; i += 16) sum = vadd(sum, vload_n(x + i, int(lower(16, n - i))));
    const V all = vset(vsum(sum));
    each(n, x, [&](int64_t i, int m) { return vdiv(vload_n(x + i, m), all); });
}

}  // namespace

#include "choice.h"

namespace {

// --- decoding -------------------------------------------------------------------------------------------------------

MF_INLINE float decode_one(const uint8_t* base, Dtype dtype, int64_t i) {
    if (dtype == Dtype::f32) {
        float x;
        memcpy(&x, base + i * 4, 4);
        return x;
    }
    uint16_t pair[16] = {};
    memcpy(pair, base + i * 2, 2);
    float t[16];
    vstore(t, dtype == Dtype::bf16 ? vbf16(pair) : vf16(pair));
    return t[0];
}

void decode_floats(const uint8_t* p, Dtype dtype, int64_t n, float* out) {
    if (dtype == Dtype::f32) {
        memcpy(out, p, size_t(n) * 4);
        return;
    }
    const uint16_t* h = (const uint16_t*)p;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) vstore(out + i, dtype == Dtype::bf16 ? vbf16(h + i) : vf16(h + i));
    if (i < n) {
        uint16_t tail[16] = {};
        memcpy(tail, h + i, size_t(n - i) * 2);
        vstore_n(out + i, dtype == Dtype::bf16 ? vbf16(tail) : vf16(tail), int(n - i));
    }
}

// Codes of one row as bytes. A row is one little-endian stream of bits; eight codes start on a byte.
void unpack_codes(const uint8_t* p, int bits, int64_t n, uint8_t* out) {
    if (bits == 8) {
        memcpy(out, p, size_t(n));
    } else if (bits == 4) {
        for (int64_t i = 0; i < n / 2; ++i) {
            out[2 * i] = p[i] & 15;
            out[2 * i + 1] = p[i] >> 4;
        }
    } else if (bits == 2) {
        for (int64_t i = 0; i < n / 4; ++i)
            for (int j = 0; j < 4; ++j) out[4 * i + j] = (p[i] >> (2 * j)) & 3;
    } else {
        const uint64_t mask = (uint64_t(1) << bits) - 1;
        for (int64_t i = 0; i < n / 8; ++i) {
            uint64_t word = 0;
            memcpy(&word, p + i * bits, size_t(bits));
            for (int j = 0; j < 8; ++j) out[8 * i + j] = uint8_t((word >> (j * bits)) & mask);
        }
    }
}

float fp8_value(uint8_t code) {
    const int exponent = (code >> 3) & 15, mantissa = code & 7;
    float x;
    if (exponent == 15 && mantissa == 7) x = NAN;
    else if (exponent == 0) x = float(mantissa) * (1.0f / 512);
    else x = ldexpf(float(8 + mantissa), exponent - 10);
    return code & 0x80 ? -x : x;
}
struct Fp8Table {
    float value[256];
    Fp8Table() {
        for (int i = 0; i < 256; ++i) value[i] = fp8_value(uint8_t(i));
    }
};

void decode_row(const Matrix& m, int64_t row, float* out) {
    const uint8_t* p = m.weight + size_t(row) * row_bytes(m);
    if (m.codec == Codec::plain) return decode_floats(p, m.dtype, m.cols, out);
    if (m.codec == Codec::fp8) {
        static const Fp8Table table;
        const int64_t columns = (m.cols + m.block - 1) / m.block, scale_row = (m.first_row + row) / m.block;
        for (int64_t b = 0; b < columns; ++b) {
            const float scale = decode_one(m.scales, m.dtype, scale_row * columns + b);
            const int64_t end = lower(m.cols, (b + 1) * m.block);
            for (int64_t i = b * m.block; i < end; ++i) out[i] = table.value[p[i]] * scale;
        }
        return;
    }
    const int64_t groups = m.cols / m.group;
    uint8_t codes[128];
    for (int64_t g = 0; g < groups; ++g) {
        unpack_codes(p + size_t(g) * size_t(m.group * m.bits / 8), m.bits, m.group, codes);
        const V scale = vset(decode_one(m.scales, m.dtype, row * groups + g));
        const V bias = vset(decode_one(m.biases, m.dtype, row * groups + g));
        for (int i = 0; i < m.group; i += 16)  // two roundings, as the reference decodes
            vstore(out + g * m.group + i, vadd(vmul(vu8(codes + i), scale), bias));
    }
}

// --- integer dot products -------------------------------------------------------------------------------------------
//
// For one (row, token), groups in ascending order, starting from +0:
//     d   = sum of code * xq over the group      exact in int32, and as a float (below 2^24)
//     acc = fma(round(s * xs), float(d), acc)
//     acc = fma(b, xsum, acc)                    xsum = round(xs * sum of xq)
// Every path below and the AVX-512 one keep to this, so they agree bit for bit.

void quantize_natural(const float* x, int64_t cols, int group, uint8_t* record) {
    const int64_t groups = cols / group;
    int8_t* q = (int8_t*)record;
    float* xs = (float*)(record + (size_t(cols) + 63) / 64 * 64);
    float* xsum = xs + groups;
    for (int64_t g = 0; g < groups; ++g) {
        const float* p = x + g * group;
        float top = 0;
        for (int i = 0; i < group; ++i) top = fabsf(p[i]) > top ? fabsf(p[i]) : top;
        const float inverse = top > 0 ? 127.0f / top : 0.0f;
        int32_t sum = 0;
        for (int i = 0; i < group; ++i) {
            const int32_t v = int32_t(rintf(p[i] * inverse));
            q[g * group + i] = int8_t(v);
            sum += v;
        }
        xs[g] = top / 127.0f;
        xsum[g] = xs[g] * float(sum);
    }
}

MF_INLINE int32_t dot_bytes(const uint8_t* codes, const int8_t* x, int n, bool wide) {
#if defined(__AVX512VNNI__)
    (void)wide;
    __m512i sum = _mm512_setzero_si512();
    int i = 0;
    for (; i + 64 <= n; i += 64)
        sum = _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(codes + i), _mm512_loadu_si512(x + i));
    if (i < n)
        sum = _mm512_dpbusd_epi32(sum, _mm512_maskz_loadu_epi8(~uint64_t(0) >> (64 - (n - i)), codes + i),
                                  _mm512_maskz_loadu_epi8(~uint64_t(0) >> (64 - (n - i)), x + i));
    return _mm512_reduce_add_epi32(sum);
#elif defined(__AVX2__)
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < n; i += 32) {
        const __m256i c = _mm256_loadu_si256((const __m256i*)(codes + i)), v = _mm256_loadu_si256((const __m256i*)(x + i));
        if (wide) {  // two products of 8-bit codes do not fit 16 bits
            const __m256i c0 = _mm256_cvtepu8_epi16(_mm256_castsi256_si128(c)), c1 = _mm256_cvtepu8_epi16(_mm256_extracti128_si256(c, 1));
            const __m256i v0 = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(v)), v1 = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(v, 1));
            sum = _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(c0, v0), _mm256_madd_epi16(c1, v1)));
        } else {
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(c, v), _mm256_set1_epi16(1)));
        }
    }
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
#else
    (void)wide;
    int32_t sum = 0;
    for (int i = 0; i < n; ++i) sum += int32_t(codes[i]) * int32_t(x[i]);
    return sum;
#endif
}

void rows_natural(const Matrix& m, const uint8_t* const* records, int64_t tokens, float* const* y, int64_t first,
                  int64_t last, uint8_t* work) {
    const int64_t groups = m.cols / m.group;
    const size_t floats_at = (size_t(m.cols) + 63) / 64 * 64, scale_bytes = size_t(groups) * (m.dtype == Dtype::f32 ? 4 : 2);
    uint8_t* codes = work;
    float* scales = (float*)(work + kMaxCols);
    float* biases = scales + kMaxCols / 32;
    for (int64_t r = first; r < last; ++r) {
        unpack_codes(m.weight + size_t(r) * row_bytes(m), m.bits, m.cols, codes);
        decode_floats(m.scales + size_t(r) * scale_bytes, m.dtype, groups, scales);
        decode_floats(m.biases + size_t(r) * scale_bytes, m.dtype, groups, biases);
        for (int64_t t = 0; t < tokens; ++t) {
            const int8_t* x = (const int8_t*)records[t];
            const float *xs = (const float*)(records[t] + floats_at), *xsum = xs + groups;
            float acc = 0;
            for (int64_t g = 0; g < groups; ++g) {
                const int32_t d = dot_bytes(codes + g * m.group, x + g * m.group, m.group, m.bits == 8);
                acc = fmaf(scales[g] * xs[g], float(d), acc);
                acc = fmaf(biases[g], xsum[g], acc);
            }
            y[t][r] = acc;
        }
    }
}

void rows_floats(const Matrix& m, const uint8_t* const* records, int64_t tokens, float* const* y, int64_t first,
                 int64_t last, uint8_t* work) {
    float* row = (float*)work;
    for (int64_t r = first; r < last; ++r) {
        const float* w = row;
        if (m.codec == Codec::plain && m.dtype == Dtype::f32) w = (const float*)(m.weight + size_t(r) * row_bytes(m));
        else decode_row(m, r, row);
        for (int64_t t = 0; t < tokens; ++t) y[t][r] = dot(w, (const float*)records[t], m.cols);
    }
}

}  // namespace

#include "attention.h"

namespace {

// --- the machine's limits -------------------------------------------------------------------------------------------

uint64_t read_all(const uint8_t* p, size_t n) {
    uint64_t result = 0;
    size_t i = 0;
#if defined(__AVX512F__)
    __m512i a[8] = {};
    for (; i + 512 <= n; i += 512)
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            a[j] = _mm512_xor_si512(a[j], _mm512_loadu_si512(p + i + 64 * j));
            _mm_prefetch((const char*)(p + i + 64 * j + 4096), _MM_HINT_T0);
        }
    for (int j = 1; j < 8; ++j) a[0] = _mm512_xor_si512(a[0], a[j]);
    uint64_t lanes[8];
    _mm512_storeu_si512(lanes, a[0]);
    for (int j = 0; j < 8; ++j) result ^= lanes[j];
#elif defined(__AVX2__)
    __m256i a[8] = {};
    for (; i + 256 <= n; i += 256)
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            a[j] = _mm256_xor_si256(a[j], _mm256_loadu_si256((const __m256i*)(p + i + 32 * j)));
            if (j % 2 == 0) _mm_prefetch((const char*)(p + i + 32 * j + 4096), _MM_HINT_T0);
        }
    for (int j = 1; j < 8; ++j) a[0] = _mm256_xor_si256(a[0], a[j]);
    uint64_t lanes[4];
    _mm256_storeu_si256((__m256i*)lanes, a[0]);
    for (int j = 0; j < 4; ++j) result ^= lanes[j];
#endif
    for (; i + 8 <= n; i += 8) {
        uint64_t word;
        memcpy(&word, p + i, 8);
        result ^= word;
    }
    return result;
}

int64_t multiply_only(int64_t rounds) {
#if defined(__AVX512VNNI__)
    // Written out, because a compiler that spills would measure itself.
    asm volatile(
        "1:\n"
        "vpdpbusd %%zmm16, %%zmm17, %%zmm0\n vpdpbusd %%zmm16, %%zmm17, %%zmm1\n"
        "vpdpbusd %%zmm16, %%zmm17, %%zmm2\n vpdpbusd %%zmm16, %%zmm17, %%zmm3\n"
        "vpdpbusd %%zmm16, %%zmm17, %%zmm4\n vpdpbusd %%zmm16, %%zmm17, %%zmm5\n"
        "vpdpbusd %%zmm16, %%zmm17, %%zmm6\n vpdpbusd %%zmm16, %%zmm17, %%zmm7\n"
        "vpdpbusd %%zmm16, %%zmm17, %%zmm8\n vpdpbusd %%zmm16, %%zmm17, %%zmm9\n"
        "vpdpbusd %%zmm16, %%zmm17, %%zmm10\n vpdpbusd %%zmm16, %%zmm17, %%zmm11\n"
        "vpdpbusd %%zmm16, %%zmm17, %%zmm12\n vpdpbusd %%zmm16, %%zmm17, %%zmm13\n"
        "vpdpbusd %%zmm16, %%zmm17, %%zmm14\n vpdpbusd %%zmm16, %%zmm17, %%zmm15\n"
        "dec %0\n jnz 1b\n"
        : "+r"(rounds)
        :
        : "cc", "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10", "zmm11", "zmm12",
          "zmm13", "zmm14", "zmm15", "zmm16", "zmm17");
    return 16 * 64;
#elif defined(__AVXVNNI__)
    __m256i d[8] = {}, x = _mm256_set1_epi8(3), w = _mm256_set1_epi8(5);
    for (int64_t r = 0; r < rounds; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(d[i]) : "x"(w), "x"(x));
    return 8 * 32;
#elif defined(__AVX2__)
    // As for 4-bit codes: pairs are added in 16 bits, eight times, before they are widened.
    __m256i d[6] = {}, pairs[6], x = _mm256_set1_epi8(3), w = _mm256_set1_epi8(5), one = _mm256_set1_epi16(1);
    for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 6
        for (int i = 0; i < 6; ++i) asm volatile("vpmaddubsw %2, %1, %0" : "=x"(pairs[i]) : "x"(w), "x"(x));
#pragma GCC unroll 1
        for (int k = 1; k < 8; ++k)
#pragma GCC unroll 6
            for (int i = 0; i < 6; ++i) {
                __m256i t;
                asm volatile("vpmaddubsw %3, %2, %1\n vpaddw %1, %0, %0" : "+x"(pairs[i]), "=&x"(t) : "x"(w), "x"(x));
            }
#pragma GCC unroll 6
        for (int i = 0; i < 6; ++i) {
            asm volatile("vpmaddwd %1, %0, %0" : "+x"(pairs[i]) : "x"(one));
            asm volatile("vpaddd %1, %0, %0" : "+x"(d[i]) : "x"(pairs[i]));
        }
    }
    return 6 * 8 * 32;
#else
    volatile int32_t sink = 0;
    int32_t sum = 0;
    for (int64_t r = 0; r < rounds; ++r) {
        for (int i = 0; i < 64; ++i) sum += int32_t(i) * int32_t(r & 127);
        asm volatile("" : "+r"(sum));
    }
    sink = sum;
    (void)sink;
    return 64;
#endif
}

}  // namespace

#include "delta.h"
