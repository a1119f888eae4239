// Affine 8-bit, groups of 64, bf16 scales, on AVX2: as the 4-bit kernel for few tokens (affine4_avx2.h, whose folds it uses),
// from records in natural order. Two products of 8-bit codes do not fit 16 bits, so codes and activations are widened first;
// AVX-VNNI needs no widening.
#pragma once

namespace {

// A group of one row with one token, in eight parts.
MF_INLINE __m256i dot_group(const uint8_t* codes, const int8_t* x) {
    __m256i sum = _mm256_setzero_si256();
#if defined(__AVXVNNI__)
#pragma GCC unroll 2
    for (int i = 0; i < 64; i += 32)
        sum = _mm256_dpbusd_avx_epi32(sum, _mm256_loadu_si256((const __m256i*)(codes + i)), _mm256_loadu_si256((const __m256i*)(x + i)));
#else
#pragma GCC unroll 4
    for (int i = 0; i < 64; i += 16)
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(codes + i))),
                                                      _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(x + i)))));
#endif
    return sum;
}

// Sixteen rows and one token.
MF_INLINE void stream16_bytes(const Matrix& m, const uint8_t* record, float* y, int64_t row) {
    const int groups = int(m.cols / 64);
    const size_t stride = size_t(m.cols);
    const uint8_t* codes = m.weight + size_t(row) * stride;
    const float* xs = (const float*)(record + (stride + 63) / 64 * 64);
    alignas(32) float s[kMaxGroups * 16], b[kMaxGroups * 16];
    transpose_scales((const uint16_t*)m.scales + row * groups, groups, s, 16, [] {});
    transpose_scales((const uint16_t*)m.biases + row * groups, groups, b, 16, [] {});
#pragma GCC unroll 1
    for (int eight = 0; eight < 16; eight += 8) {
        __m256 acc = _mm256_setzero_ps();
        for (int g = 0; g < groups; ++g) {
            const int8_t* x = (const int8_t*)record + size_t(g) * 64;
            __m256i v[8];
#pragma GCC unroll 8
            for (int r = 0; r < 8; ++r) {
                const uint8_t* c = codes + size_t(eight + r) * stride + size_t(g) * 64;
                _mm_prefetch((const char*)(c + 256), _MM_HINT_T0);
                v[r] = dot_group(c, x);
            }
            const __m256i d = fold8(fold4(v[0], v[1], v[2], v[3]), fold4(v[4], v[5], v[6], v[7]));
            acc = step(acc, d, _mm256_load_ps(s + g * 16 + eight), _mm256_load_ps(b + g * 16 + eight), xs[g], xs[groups + g]);
        }
        _mm256_storeu_ps(y + row + eight, acc);
    }
}

void rows_bytes(const Matrix& m, const uint8_t* const* records, int64_t tokens, float* const* y, int64_t first, int64_t last,
                uint8_t* work) {
    const int64_t whole = first + (last - first) / 16 * 16;
    for (int64_t r = first; r < whole; r += 16)
        for (int64_t t = 0; t < tokens; ++t) stream16_bytes(m, records[t], y[t], r);
    if (whole < last) rows_natural(m, records, tokens, y, whole, last, work);
}

}  // namespace
