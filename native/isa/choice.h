// Passes over the vocabulary when a token is chosen. Included by impl.h.
#pragma once

namespace {

// y = e^((x - peak) / temperature), and 0 for what is not allowed or further below the peak than e^-87.
void weigh(const float* x, const uint8_t* allowed, int64_t n, float peak, float temperature, float* y) {
    const V top = vset(peak), t = vset(temperature), least = vset(1.64581145e-38f);  // what vexp gives there
    each(n, y, [&](int64_t i, int m) {
        const V w = vexp(vdiv(vsub(vload_n(x + i, m), top), t));
        return vmax(vsub(w, least), vset(0));
    });
    if (allowed)
        for (int64_t i = 0; i < n; ++i) y[i] = allowed[i] ? y[i] : 0.0f;
}

// The sum of e^(x - peak).
double exp_total(const float* x, int64_t n, float peak) {
    constexpr int64_t stretch = 1024;
    const V top = vset(peak);
    double total = 0;
    for (int64_t i = 0; i < n; i += stretch) {
        const int64_t end = lower(n, i + stretch);
        V sum = vset(0);
        int64_t j = i;
        for (; j + 16 <= end; j += 16) sum = vadd(sum, vexp(vsub(vload(x + j), top)));
        total += vsum(sum);
        for (; j < end; ++j) total += sexp(x[j] - peak);
    }
    return total;
}

// How many are at least `bound`, and their sum: in floats over short stretches, in doubles over those.
double sum_from(const float* x, int64_t n, float bound, int64_t* count) {
    constexpr int64_t stretch = 1024;
    const V least = vset(bound), one = vset(1);
    double sum = 0;
    int64_t many = 0;
    for (int64_t i = 0; i < n; i += stretch) {
        const int64_t end = lower(n, i + stretch);
        V s0 = vset(0), s1 = vset(0), c0 = vset(0), c1 = vset(0);
        int64_t j = i;
        for (; j + 32 <= end; j += 32) {
            const V a = vload(x + j), b = vload(x + j + 16);
            s0 = vadd(s0, vpick(a, least, a));
            s1 = vadd(s1, vpick(b, least, b));
            c0 = vadd(c0, vpick(a, least, one));
            c1 = vadd(c1, vpick(b, least, one));
        }
        sum += vsum(vadd(s0, s1));
        many += int64_t(vsum(vadd(c0, c1)));
        for (; j < end; ++j)
            if (x[j] >= bound) {
                sum += x[j];
                ++many;
            }
    }
    *count = many;
    return sum;
}

// Copies those from `low` to below `high`, in their order. `out` may be x.
int64_t between(const float* x, int64_t n, float low, float high, float* out) {
    int64_t k = 0, i = 0;
#if defined(__AVX512F__)
    const __m512 from = _mm512_set1_ps(low), to = _mm512_set1_ps(high);
    for (; i + 16 <= n; i += 16) {
        const __m512 v = _mm512_loadu_ps(x + i);
        const __mmask16 in = _mm512_cmp_ps_mask(v, from, _CMP_GE_OQ) & _mm512_cmp_ps_mask(v, to, _CMP_LT_OQ);
        _mm512_mask_compressstoreu_ps(out + k, in, v);
        k += __builtin_popcount(in);
    }
#endif
    for (; i < n; ++i) {  // no branch: half of them would be guessed wrong
        const float v = x[i];
        out[k] = v;
        k += v >= low && v < high;
    }
    return k;
}

}  // namespace
