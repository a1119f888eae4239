// Sixteen float lanes on any instruction set. The same steps in the same order everywhere: reductions are one fixed
// tree, and only `fma` differs (the generic build rounds twice), so instruction sets agree to rounding.
//
// Everything has internal linkage: this file is compiled once per instruction set, and a shared inline function would
// let the linker hand AVX-512 code to a machine without it.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define MF_INLINE static inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)

struct V {
    __m512 v;
};
MF_INLINE V vset(float x) { return {_mm512_set1_ps(x)}; }
MF_INLINE V vload(const float* p) { return {_mm512_loadu_ps(p)}; }
MF_INLINE void vstore(float* p, V a) { _mm512_storeu_ps(p, a.v); }
MF_INLINE V vload_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)}; }
MF_INLINE void vstore_n(float* p, V a, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), a.v); }
MF_INLINE V vadd(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
MF_INLINE V vsub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
MF_INLINE V vmul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
MF_INLINE V vdiv(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
MF_INLINE V vmax(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
MF_INLINE V vmin(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
MF_INLINE V vfma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
MF_INLINE V vround(V a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
MF_INLINE V vbf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
MF_INLINE V vf16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
MF_INLINE V vu8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
MF_INLINE V vpick(V a, V b, V x) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), x.v)}; }
MF_INLINE V vscale2(V a, V n) { return {_mm512_scalef_ps(a.v, n.v)}; }  // a * 2^n

#elif defined(__AVX2__)

struct V {
    __m256 a, b;
};
MF_INLINE V vset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
MF_INLINE V vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
MF_INLINE void vstore(float* p, V x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
MF_INLINE V vadd(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
MF_INLINE V vsub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
MF_INLINE V vmul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
MF_INLINE V vdiv(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
MF_INLINE V vmax(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
MF_INLINE V vmin(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
MF_INLINE V vfma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
MF_INLINE V vround(V x) {
    return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
MF_INLINE __m256 bf16_half(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
MF_INLINE V vbf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
MF_INLINE V vf16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
MF_INLINE V vu8(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
MF_INLINE V vpick(V a, V b, V x) {
    return {_mm256_and_ps(_mm256_cmp_ps(a.a, b.a, _CMP_GE_OQ), x.a), _mm256_and_ps(_mm256_cmp_ps(a.b, b.b, _CMP_GE_OQ), x.b)};
}
MF_INLINE __m256 pow2_half(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
MF_INLINE V vscale2(V x, V n) { return {_mm256_mul_ps(x.a, pow2_half(n.a)), _mm256_mul_ps(x.b, pow2_half(n.b))}; }

#else

struct V {
    float f[16];
};
#define MF_EACH(expression)                     \
    V r;                                        \
    for (int i = 0; i < 16; ++i) r.f[i] = expression; \
    return r
MF_INLINE V vset(float x) { MF_EACH(x); }
MF_INLINE V vload(const float* p) { MF_EACH(p[i]); }
MF_INLINE void vstore(float* p, V a) { memcpy(p, a.f, sizeof a.f); }
MF_INLINE V vadd(V a, V b) { MF_EACH(a.f[i] + b.f[i]); }
MF_INLINE V vsub(V a, V b) { MF_EACH(a.f[i] - b.f[i]); }
MF_INLINE V vmul(V a, V b) { MF_EACH(a.f[i] * b.f[i]); }
MF_INLINE V vdiv(V a, V b) { MF_EACH(a.f[i] / b.f[i]); }
MF_INLINE V vmax(V a, V b) { MF_EACH(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
MF_INLINE V vmin(V a, V b) { MF_EACH(a.f[i] < b.f[i] ? a.f[i] : b.f[i]); }
MF_INLINE V vfma(V a, V b, V c) { MF_EACH(a.f[i] * b.f[i] + c.f[i]); }
MF_INLINE V vpick(V a, V b, V x) { MF_EACH(a.f[i] >= b.f[i] ? x.f[i] : 0.0f); }  // x where a >= b, else 0
MF_INLINE V vround(V a) { MF_EACH(rintf(a.f[i])); }
MF_INLINE float bf16_one(uint16_t h) {
    uint32_t bits = uint32_t(h) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
MF_INLINE float f16_one(uint16_t h) {
    const int exponent = (h >> 10) & 31, mantissa = h & 1023;
    float x;
    if (exponent == 0) x = ldexpf(float(mantissa), -24);
    else if (exponent == 31) x = mantissa ? NAN : INFINITY;
    else x = ldexpf(float(mantissa + 1024), exponent - 25);
    return h & 0x8000 ? -x : x;
}
MF_INLINE V vbf16(const uint16_t* p) { MF_EACH(bf16_one(p[i])); }
MF_INLINE V vf16(const uint16_t* p) { MF_EACH(f16_one(p[i])); }
MF_INLINE V vu8(const uint8_t* p) { MF_EACH(float(p[i])); }
MF_INLINE V vscale2(V a, V n) { MF_EACH(ldexpf(a.f[i], int(n.f[i]))); }
#undef MF_EACH

#endif

#if !defined(__AVX512F__)
MF_INLINE V vload_n(const float* p, int n) {
    float t[16] = {};
    memcpy(t, p, size_t(n) * 4);
    return vload(t);
}
MF_INLINE void vstore_n(float* p, V a, int n) {
    float t[16];
    vstore(t, a);
    memcpy(p, t, size_t(n) * 4);
}
#endif

// Lane i with lane i + 8, then + 4, + 2, + 1.
#if defined(__AVX2__)
MF_INLINE float vsum(V a) {
#if defined(__AVX512F__)
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#else
    const __m256 eight = _mm256_add_ps(a.a, a.b);
#endif
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
MF_INLINE float vsum(V a) {
    float t[16];
    vstore(t, a);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) t[i] += t[i + width];
    return t[0];
}
#endif
#if defined(__AVX512F__)
MF_INLINE float vhigh(V a) { return _mm512_reduce_max_ps(a.v); }
// Keeps a vector in a register: compilers otherwise load what is broadcast anew for each use.
MF_INLINE V vpin(V a) {
    asm("" : "+v"(a.v));
    return a;
}
// Sixteen vectors as the rows of a square, turned round.
MF_INLINE void vturn(V* a) {
    __m512 x[16], y[16];
    for (int i = 0; i < 16; i += 2) {
        x[i] = _mm512_unpacklo_ps(a[i].v, a[i + 1].v);
        x[i + 1] = _mm512_unpackhi_ps(a[i].v, a[i + 1].v);
    }
    for (int i = 0; i < 16; i += 4)
        for (int h = 0; h < 2; ++h) {
            const __m512d p = _mm512_castps_pd(x[i + h]), q = _mm512_castps_pd(x[i + 2 + h]);
            y[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(p, q));
            y[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(p, q));
        }
    for (int i = 0; i < 4; ++i) {  // blocks of four rows to blocks of four columns
        const __m512 lo = _mm512_shuffle_f32x4(y[i], y[4 + i], 0x44), hi = _mm512_shuffle_f32x4(y[i], y[4 + i], 0xEE);
        const __m512 lo2 = _mm512_shuffle_f32x4(y[8 + i], y[12 + i], 0x44), hi2 = _mm512_shuffle_f32x4(y[8 + i], y[12 + i], 0xEE);
        a[i].v = _mm512_shuffle_f32x4(lo, lo2, 0x88);
        a[4 + i].v = _mm512_shuffle_f32x4(lo, lo2, 0xDD);
        a[8 + i].v = _mm512_shuffle_f32x4(hi, hi2, 0x88);
        a[12 + i].v = _mm512_shuffle_f32x4(hi, hi2, 0xDD);
    }
}
#else
MF_INLINE float vhigh(V a) {
    float t[16];
    vstore(t, a);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) t[i] = t[i] > t[i + width] ? t[i] : t[i + width];
    return t[0];
}
MF_INLINE V vpin(V a) { return a; }
MF_INLINE void vturn(V* a) {
    float from[16][16], to[16][16];
    for (int i = 0; i < 16; ++i) vstore(from[i], a[i]);
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 16; ++j) to[j][i] = from[i][j];
    for (int i = 0; i < 16; ++i) a[i] = vload(to[i]);
}
#endif

// e^x to about one unit in the last place, for x held between -87 (1.6e-38) and 88 (1.7e38).
MF_INLINE V vexp(V x) {
    x = vmax(vmin(x, vset(88.0f)), vset(-87.0f));
    const V n = vround(vmul(x, vset(1.44269504088896341f)));
    V r = vfma(n, vset(-0.693359375f), x);
    r = vfma(n, vset(2.12194440e-4f), r);
    V p = vset(1.9875691500e-4f);
    p = vfma(p, r, vset(1.3981999507e-3f));
    p = vfma(p, r, vset(8.3334519073e-3f));
    p = vfma(p, r, vset(4.1665795894e-2f));
    p = vfma(p, r, vset(1.6666665459e-1f));
    p = vfma(p, r, vset(5.0000001201e-1f));
    p = vadd(vfma(vmul(p, r), r, r), vset(1.0f));
    return vscale2(p, n);
}
MF_INLINE V vsigmoid(V x) { return vdiv(vset(1.0f), vadd(vset(1.0f), vexp(vsub(vset(0.0f), x)))); }
MF_INLINE V vsilu(V x) { return vmul(x, vsigmoid(x)); }

// Scalar twins of the above, bit for bit what a lane would give.
MF_INLINE float sexp(float x) {
    float t[16];
    vstore(t, vexp(vset(x)));
    return t[0];
}

}  // namespace
