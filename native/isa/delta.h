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
        for (int64_t t = 0; t < tokens; ++t) {
            if (t + 2 < tokens)  // rows lie too far apart for the processor to foresee them
                prefetch((const uint8_t*)(x + (t + 2) * channels + begin), n * 4);
            const float* rows[kMaxTaps];
            for (int64_t tap = 0; tap < width; ++tap) {
                const int64_t at = t + tap - past;
                rows[tap] = (at < 0 ? state + (past + at) * channels : x + at * channels) + begin;
            }
            each(n, y + t * channels + begin, [&](int64_t c, int m) {
                V sum = vmul(vload_n(rows[0] + c, m), vload_n(turned + c, m));
                for (int64_t tap = 1; tap < width; ++tap)
                    sum = vadd(sum, vmul(vload_n(rows[tap] + c, m), vload_n(turned + tap * most + c, m)));
                return vsilu(sum);
            });
        }
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

// All tokens over NV vectors of columns of a head's state, n elements of a lone one: what they hold for k, the change towards
// v, what they then give for q. While a token changes them, what they hold for the next one is found, so that they are read
// once for each. The sums stay in registers, two chains each (rows in turn), because a chain waits for its last product. What
// a column gives does not depend on how many go together. FAR: the state lies in memory, not in the cache.
template <int NV, bool FAR>
MF_INLINE void delta_columns(const DeltaSpan& s, int64_t head, int64_t first, int n, float* state, int64_t stride) {
    const int64_t dk = s.key_dim, dv = s.value_dim, key_head = head / (s.heads / s.key_heads);
    const auto load = [n](const float* p, int j) { return NV > 1 ? vload(p + j * 16) : vload_n(p + j * 16, n); };
    const auto store = [n](float* p, int j, V x) {
        if (NV > 1) vstore(p + j * 16, x);
        else vstore_n(p + j * 16, x, n);
    };
    const auto over_rows = [dk](auto row) {
        int64_t r = 0;
        for (; r + 2 <= dk; r += 2) {
            row(r, 0);
            row(r + 1, 1);
        }
        if (r < dk) row(r, 0);
    };
    V held[2][NV], given[2][NV], change[NV];
    const auto clear = [](V (&sums)[2][NV]) {
        for (int j = 0; j < NV; ++j) sums[0][j] = sums[1][j] = vset(0);
    };
    const float* k = s.u + (s.key_heads + key_head) * dk;
    clear(held);
    over_rows([&](int64_t r, int chain) {
        const float* p = state + r * stride;
        if (FAR) prefetch((const uint8_t*)(p + 8 * stride), NV * 64);
        for (int j = 0; j < NV; ++j) held[chain][j] = vfma(vset(k[r]), load(p, j), held[chain][j]);
    });
    for (int64_t t = 0; t < s.tokens; ++t, k += s.channels) {
        const float *u = s.u + t * s.channels, *q = u + key_head * dk, *v = u + 2 * s.key_heads * dk + head * dv + first;
        if (t + 2 < s.tokens) {  // rows lie too far apart for the processor to foresee them
            prefetch((const uint8_t*)(q + s.channels), dk * 4);
            prefetch((const uint8_t*)(k + 2 * s.channels), dk * 4);
            prefetch((const uint8_t*)(v + s.channels), NV * 64);
        }
        const float decay = s.decay[t * s.heads + head], beta = s.beta[t * s.heads + head];
        for (int j = 0; j < NV; ++j)
            change[j] = vmul(vsub(load(v, j), vmul(vset(decay), vadd(held[0][j], held[1][j]))), vset(beta));
        const auto alter = [&](int64_t r, int chain, int j) {
            float* p = state + r * stride;
            const V next = vfma(vset(k[r]), change[j], vmul(load(p, j), vset(decay)));
            store(p, j, next);
            given[chain][j] = vfma(vset(q[r]), next, given[chain][j]);
            return next;
        };
        clear(given);
        if (t + 1 < s.tokens) {
            const float* next_k = k + s.channels;
            clear(held);
            over_rows([&](int64_t r, int chain) {
                for (int j = 0; j < NV; ++j) held[chain][j] = vfma(vset(next_k[r]), alter(r, chain, j), held[chain][j]);
            });
        } else {
            over_rows([&](int64_t r, int chain) {
                for (int j = 0; j < NV; ++j) alter(r, chain, j);
            });
        }
        float* out = s.out + (t * s.heads + head) * dv + first;
        for (int j = 0; j < NV; ++j) store(out, j, vadd(given[0][j], given[1][j]));
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
        if (t + 1 < s.tokens) {
            prefetch((const uint8_t*)(out + s.heads * dv), dv * 4);
            prefetch((const uint8_t*)(s.z + (t + 1) * s.z_stride + head * dv), dv * 4);
        }
        rms_norm(out, s.norm, s.eps, dv, out);
        const float* z = s.z + t * s.z_stride + head * dv;
        each(dv, out, [&](int64_t c, int m) { return vmul(vload_n(out + c, m), vsilu(vload_n(z + c, m))); });
    }
}

}  // namespace
