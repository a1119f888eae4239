// The gated delta net: causal convolution and the delta rule. Included by impl.h.
#pragma once

namespace {

// Channels side by side, so their weights are turned round first. A token's taps are the rows before it, so rows are taken in
// order and a stretch of channels stays in the first-level cache.
void convolve(const float* x, int64_t tokens, int64_t channels, const float* weight, int64_t width, float* state,
              int64_t first, int64_t last, float* y) {
    constexpr int64_t kWeights = 4096;
    static_assert(kWeights >= kMaxTaps * 16);
    const int64_t past = width - 1, most = lower(256, kWeights / width);
    float turned[kWeights];  // [width, most]
    for (int64_t begin = first; begin < last; begin += most) {
        const int64_t n = lower(most, last - begin);
        for (int64_t c = 0; c < n; ++c)
            for (int64_t tap = 0; tap < width; ++tap) turned[tap * most + c] = weight[(begin + c) * width + tap];
        for (int64_t t = 0; t < tokens; ++t)
            each(n, y + t * channels + begin, [&](int64_t c, int m) {
                V sum = vset(0);
                for (int64_t tap = 0; tap < width; ++tap) {
                    const int64_t at = t + tap - past;
                    const float* row = at < 0 ? state + (past + at) * channels : x + at * channels;
                    const V product = vmul(vload_n(row + begin + c, m), vload_n(turned + tap * most + c, m));
                    sum = tap == 0 ? product : vadd(sum, product);
                }
                return vsilu(sum);
            });
    }
    for (int64_t slot = 0; slot < past; ++slot) {  // the last inputs, oldest first
        const int64_t at = tokens - past + slot;
        memmove(state + slot * channels + first, (at < 0 ? state + (past + at) * channels : x + at * channels) + first,
                size_t(last - first) * 4);
    }
}

MF_INLINE void l2_normalize(float* x, int64_t n, float gain) {
    const V s = vset(gain / sqrtf(dot(x, x, n) + 1e-6f));
    each(n, x, [&](int64_t i, int m) { return vmul(vload_n(x + i, m), s); });
}

void delta_keys(float* u, int64_t tokens, int64_t channels, int64_t key_heads, int64_t key_dim, int64_t key_head) {
    const float gain = 1.0f / sqrtf(float(key_dim));
    for (int64_t t = 0; t < tokens; ++t) {
        l2_normalize(u + t * channels + key_head * key_dim, key_dim, gain);
        l2_normalize(u + t * channels + (key_heads + key_head) * key_dim, key_dim, 1.0f);
    }
}

// NV vectors of columns over all rows of a head's state: what it holds for k, the change towards v, what it gives for q.
// The state is read once to be compared and once to be changed; the sums stay in registers, two chains each (rows in turn),
// because a chain waits for its last product. What a column gives does not depend on how many go together. FAR: the state lies in
// memory, not in the cache.
template <int NV, bool FAR>
MF_INLINE void delta_strip(float* state, int64_t rows, int64_t stride, int n, const float* q, const float* k, const float* v,
                           float decay, float beta, float* out) {
    const auto load = [n](const float* p, int j) { return NV > 1 ? vload(p + j * 16) : vload_n(p + j * 16, n); };
    V sum[2][NV], change[NV];
    const auto clear = [&] {
        for (int j = 0; j < NV; ++j) sum[0][j] = sum[1][j] = vset(0);
    };
    const auto compare = [&](int64_t r, V* into) {
        const float* p = state + r * stride;
        if (FAR) prefetch((const uint8_t*)(p + 8 * stride), NV * 64);
        for (int j = 0; j < NV; ++j) into[j] = vfma(vset(k[r]), load(p, j), into[j]);
    };
    const auto alter = [&](int64_t r, V* into) {
        float* p = state + r * stride;
        for (int j = 0; j < NV; ++j) {
            const V next = vfma(vset(k[r]), change[j], vmul(load(p, j), vset(decay)));
            if (NV > 1) vstore(p + j * 16, next);
            else vstore_n(p, next, n);
            into[j] = vfma(vset(q[r]), next, into[j]);
        }
    };
    clear();
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2) {
        compare(r, sum[0]);
        compare(r + 1, sum[1]);
    }
    if (r < rows) compare(r, sum[0]);
    for (int j = 0; j < NV; ++j)
        change[j] = vmul(vsub(load(v, j), vmul(vset(decay), vadd(sum[0][j], sum[1][j]))), vset(beta));
    clear();
    for (r = 0; r + 2 <= rows; r += 2) {
        alter(r, sum[0]);
        alter(r + 1, sum[1]);
    }
    if (r < rows) alter(r, sum[0]);
    for (int j = 0; j < NV; ++j) {
        if (NV > 1) vstore(out + j * 16, vadd(sum[0][j], sum[1][j]));
        else vstore_n(out, vadd(sum[0][j], sum[1][j]), n);
    }
}

// All tokens over columns of a head's state, n of a lone vector.
template <int NV, bool FAR>
MF_INLINE void delta_columns(const DeltaSpan& s, int64_t head, int64_t first, int n, float* state, int64_t stride) {
    const int64_t dk = s.key_dim, dv = s.value_dim, key_head = head / (s.heads / s.key_heads);
    for (int64_t t = 0; t < s.tokens; ++t) {
        const float *u = s.u + t * s.channels, *v = u + 2 * s.key_heads * dk + head * dv + first;
        delta_strip<NV, FAR>(state, dk, stride, n, u + key_head * dk, u + (s.key_heads + key_head) * dk, v,
                        s.decay[t * s.heads + head], s.beta[t * s.heads + head], s.out + (t * s.heads + head) * dv + first);
    }
}

// Columns of the state know nothing of each other. For few tokens they are taken as they lie in memory, for many a part at a
// time, which is copied together so that it stays in the first-level cache from token to token.
void delta_head(const DeltaSpan& s, int64_t head) {
    constexpr int64_t kPart = 64, kMost = 128;
    const int64_t dk = s.key_dim, dv = s.value_dim;
    float* state = s.state + head * dk * dv;
    int64_t i = 0;
    if (s.tokens > 4 && dk <= kMost) {
        alignas(64) float part[kMost * kPart];
        for (; i + kPart <= dv; i += kPart) {
            for (int64_t r = 0; r < dk; ++r) memcpy(part + r * kPart, state + r * dv + i, kPart * 4);
            delta_columns<kPart / 16, false>(s, head, i, 16, part, kPart);
            for (int64_t r = 0; r < dk; ++r) memcpy(state + r * dv + i, part + r * kPart, kPart * 4);
        }
    }
    for (; i + 128 <= dv; i += 128) delta_columns<8, true>(s, head, i, 16, state + i, dv);
    for (; i < dv; i += 16) delta_columns<1, true>(s, head, i, int(lower(16, dv - i)), state + i, dv);
    for (int64_t t = 0; t < s.tokens; ++t) {
        float* out = s.out + (t * s.heads + head) * dv;
        rms_norm(out, s.norm, s.eps, dv, out);
        const float* z = s.z + t * s.z_stride + head * dv;
        each(dv, out, [&](int64_t c, int m) { return vmul(vload_n(out + c, m), vsilu(vload_n(z + c, m))); });
    }
}

}  // namespace
