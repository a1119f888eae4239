// Affine 8-bit, groups of 64, bf16 scales: routers and other small matrices that stay precise. As the 4-bit kernel for few
// tokens (affine4_avx512.h, whose folds it uses), from records in natural order.
#pragma once

namespace {

// Sixteen rows.
template <int NT>
MF_INLINE void stream16_bytes(const uint8_t* codes, const uint16_t* scales, const uint16_t* biases, int64_t cols,
                              const uint8_t* const* records, float* const* y, int64_t row, __mmask16 wanted) {
    const int groups = int(cols / 64);
    const size_t stride = size_t(cols);
    alignas(64) float s[kMaxGroups * 16], b[kMaxGroups * 16];
    transpose_scales(scales, groups, s, 16, [] {});
    transpose_scales(biases, groups, b, 16, [] {});
    __m512 acc[NT];
    for (int t = 0; t < NT; ++t) acc[t] = _mm512_setzero_ps();
    for (int g = 0; g < groups; ++g) {
        const int later = g + 4;  // groups of these rows, then of the sixteen behind them
        const uint8_t* ahead = codes + (later < groups ? 0 : 16 * stride) + size_t(later < groups ? later : later - groups) * 64;
        __m512i quads[NT][4];
#pragma GCC unroll 4
        for (int a = 0; a < 4; ++a) {
            __m512i c[4];
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) {
                c[r] = _mm512_loadu_si512(codes + (a * 4 + r) * stride + g * 64);
                _mm_prefetch((const char*)(ahead + (a * 4 + r) * stride), _MM_HINT_T0);
            }
#pragma GCC unroll 4
            for (int t = 0; t < NT; ++t) {
                const __m512i x = _mm512_loadu_si512(records[t] + g * 64);
                __m512i v[4];
#pragma GCC unroll 4
                for (int r = 0; r < 4; ++r) v[r] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), c[r], x);
                quads[t][a] = fold4(v[0], v[1], v[2], v[3]);
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < NT; ++t) {
            const float* xs = (const float*)(records[t] + (stride + 63) / 64 * 64);
            __m512i first, second;
            fold16(quads[t], first, second);
            acc[t] = step(acc[t], _mm512_add_epi32(first, second), _mm512_load_ps(s + g * 16), _mm512_load_ps(b + g * 16), xs[g],
                          xs[groups + g]);
        }
    }
    for (int t = 0; t < NT; ++t) _mm512_mask_storeu_ps(y[t] + row, wanted, acc[t]);
}

template <int NT>
__attribute__((noinline)) void stream_bytes(const Matrix& m, const uint8_t* const* records, float* const* y, int64_t first,
                                            int64_t last) {
    const size_t stride = size_t(m.cols), groups = size_t(m.cols / 64);
    for (int64_t r = first; r + 16 <= last; r += 16)
        stream16_bytes<NT>(m.weight + size_t(r) * stride, (const uint16_t*)m.scales + size_t(r) * groups,
                           (const uint16_t*)m.biases + size_t(r) * groups, m.cols, records, y, r, 0xffff);
}

void rows_bytes(const Matrix& m, const uint8_t* const* records, int64_t tokens, float* const* y, int64_t first, int64_t last,
                uint8_t* work) {
    const int64_t whole = first + (last - first) / 16 * 16;
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4) stream_bytes<4>(m, records + t, y + t, first, whole);
    for (; t < tokens; ++t) stream_bytes<1>(m, records + t, y + t, first, whole);
    if (whole < last) rows_natural(m, records, tokens, y, whole, last, work);
}

}  // namespace
