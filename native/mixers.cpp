// The machine's mixers: attention, latent attention, gated delta net.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "buffers.h"

namespace moeflux {

const float* Machine::angles(const Rotation& r, Spans spans, int64_t tokens) {
    const size_t half = r.frequencies.size();
    float* table = reinterpret_cast<float*>(scratch(kAngles, size_t(tokens) * half * 8));
    for (const auto& span : spans)
        for (int64_t t = span.start; t < span.stop; ++t)
            for (size_t i = 0; i < half; ++i) {
                const double angle = double(span.position + t - span.start) * r.frequencies[i];
                table[size_t(t) * 2 * half + i] = float(std::cos(angle) * r.scale);
                table[size_t(t) * 2 * half + half + i] = float(std::sin(angle) * r.scale);
            }
    return table;
}

void Machine::rotate(const Rotation& r, const float* table, int64_t token, float* x) const {
    const size_t half = r.frequencies.size();
    const float *cos = table + size_t(token) * 2 * half, *sin = cos + half;
    for (size_t i = 0; i < half; ++i) {
        float& a = r.interleaved ? x[2 * i] : x[i];
        float& b = r.interleaved ? x[2 * i + 1] : x[half + i];
        const float before = a;
        a = before * cos[i] - b * sin[i];
        b = b * cos[i] + before * sin[i];
    }
}

void Machine::append(const float* row, int64_t n, Dtype dtype, uint8_t* to) const {
    if (dtype == Dtype::f32) {
        std::memcpy(to, row, size_t(n) * 4);
        return;
    }
    for (int64_t i = 0; i < n; ++i) {  // bf16, to nearest even
        uint32_t bits;
        std::memcpy(&bits, row + i, 4);
        const uint16_t half = std::isnan(row[i]) ? 0x7FC0 : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
        std::memcpy(to + i * 2, &half, 2);
    }
}

void Machine::attend(const AttendSpan& span, int64_t tokens) {
    const int64_t ratio = span.heads / span.groups, per_block = std::min<int64_t>(kAttendHeads, ratio);
    const int64_t blocks = ceil_div(ratio, per_block), tiles = ceil_div(tokens, kAttendTokens);
    const size_t work = (attend_work(per_block, span.dim, span.value_dim) + 15) / 16 * 16;
    float* base = reinterpret_cast<float*>(scratch(kThird, work * 4 * size_t(threads())));
    pool_.run(tiles * span.groups * blocks, [&](int64_t chunk, int worker) {
        const int64_t tile = tiles - 1 - chunk / (span.groups * blocks);  // the longest first
        const int64_t group = chunk % (span.groups * blocks) / blocks, block = chunk % blocks;
        const int64_t first_head = group * ratio + block * per_block;
        const int64_t last_head = std::min(first_head + per_block, (group + 1) * ratio);
        const int64_t first = tile * kAttendTokens, last = std::min(tokens, first + kAttendTokens);
        k_->attend(span, first_head, last_head, first, last, base + work * size_t(worker));
    });
}

void Machine::attention(const float* q, const float* k, const float* v, const float* q_norm, const float* k_norm, float eps,
                        const AttentionShape& s, const Rotation& rotation, Spans spans, float* out) {
    const Call call(*this);
    const int64_t tokens = spans.back().stop, q_width = s.gated ? 2 * s.dim : s.dim;
    if (tokens == int64_t(spans.size()) && s.heads / s.groups <= kAttendHeads)
        return attend_one_token(q, k, v, q_norm, k_norm, eps, s, rotation, spans, out);
    const float* table = angles(rotation, spans, tokens);
    float* rotated = reinterpret_cast<float*>(scratch(kFirst, size_t(tokens * s.heads * s.dim) * 4));
    float* key = reinterpret_cast<float*>(scratch(kSecond, size_t(tokens * s.groups * s.dim) * 4));
    const int64_t per_chunk = tokens > 8 ? 4 : tokens;
    pool_.run(ceil_div(tokens, per_chunk), [&](int64_t chunk, int) {
        for (int64_t t = chunk * per_chunk; t < std::min(tokens, (chunk + 1) * per_chunk); ++t) {
            for (int64_t h = 0; h < s.heads; ++h) {
                float* to = rotated + (t * s.heads + h) * s.dim;
                k_->rms_norm(q + (t * s.heads + h) * q_width, q_norm, eps, s.dim, to);
                rotate(rotation, table, t, to);
            }
            for (int64_t g = 0; g < s.groups; ++g) {
                float* to = key + (t * s.groups + g) * s.dim;
                k_->rms_norm(k + (t * s.groups + g) * s.dim, k_norm, eps, s.dim, to);
                rotate(rotation, table, t, to);
            }
        }
    });
    const int64_t row = s.groups * s.dim;
    for (const auto& span : spans) {
        const int64_t element = span.dtype == Dtype::f32 ? 4 : 2;
        over_tokens(span.stop - span.start, [&](int64_t first, int64_t last, int) {
            for (int64_t i = first; i < last; ++i) {
                const int64_t t = span.start + i, at = span.position + i;
                append(key + t * row, row, span.dtype, Span::row(span.first, at, row * element));
                append(v + t * row, row, span.dtype, Span::row(span.second, at, row * element));
            }
        });
        attend({rotated + span.start * s.heads * s.dim, out + span.start * s.heads * s.dim, span.first, span.second, row, row,
                s.heads, s.groups, s.dim, s.dim, span.position, 1.0f / std::sqrt(float(s.dim)), span.dtype},
               span.stop - span.start);
    }
    if (!s.gated) return;
    over_tokens(tokens, [&](int64_t first, int64_t last, int) {
        for (int64_t i = first * s.heads; i < last * s.heads; ++i)
            k_->sigmoid_mul(q + i * q_width + s.dim, s.dim, out + i * s.dim);
    });
}

// One token of each sequence: a key-value group at a time from norm to output, as one job.
void Machine::attend_one_token(const float* q, const float* k, const float* v, const float* q_norm, const float* k_norm,
                               float eps, const AttentionShape& s, const Rotation& rotation, Spans spans, float* out) {
    const int64_t tokens = spans.back().stop, q_width = s.gated ? 2 * s.dim : s.dim, ratio = s.heads / s.groups;
    const int64_t row = s.groups * s.dim;
    const float* table = angles(rotation, spans, tokens);
    float* rotated = reinterpret_cast<float*>(scratch(kFirst, size_t(tokens * s.heads * s.dim) * 4));
    float* key = reinterpret_cast<float*>(scratch(kSecond, size_t(tokens * row) * 4));
    const size_t work = (attend_work(ratio, s.dim, s.dim) + 15) / 16 * 16;
    float* base = reinterpret_cast<float*>(scratch(kThird, work * 4 * size_t(threads())));
    pool_.run(tokens * s.groups, [&](int64_t chunk, int worker) {
        const int64_t t = chunk / s.groups, g = chunk % s.groups;
        const Span& span = spans[size_t(t)];
        for (int64_t h = g * ratio; h < (g + 1) * ratio; ++h) {
            float* to = rotated + (t * s.heads + h) * s.dim;
            k_->rms_norm(q + (t * s.heads + h) * q_width, q_norm, eps, s.dim, to);
            rotate(rotation, table, t, to);
        }
        float* one = key + t * row + g * s.dim;
        k_->rms_norm(k + t * row + g * s.dim, k_norm, eps, s.dim, one);
        rotate(rotation, table, t, one);
        const int64_t element = span.dtype == Dtype::f32 ? 4 : 2, within = g * s.dim * element;
        append(one, s.dim, span.dtype, Span::row(span.first, span.position, row * element) + within);
        append(v + t * row + g * s.dim, s.dim, span.dtype, Span::row(span.second, span.position, row * element) + within);
        float* to = out + t * s.heads * s.dim;
        k_->attend({rotated + t * s.heads * s.dim, to, span.first, span.second, row, row, s.heads, s.groups, s.dim, s.dim,
                    span.position, 1.0f / std::sqrt(float(s.dim)), span.dtype},
                   g * ratio, (g + 1) * ratio, 0, 1, base + work * size_t(worker));
        if (!s.gated) return;
        for (int64_t h = g * ratio; h < (g + 1) * ratio; ++h)
            k_->sigmoid_mul(q + (t * s.heads + h) * q_width + s.dim, s.dim, to + h * s.dim);
    });
}

void Machine::latent_attention(const float* q_latent, const float* q_rope, int64_t q_stride, const float* kv, const float* norm,
                               float eps, int64_t heads, int64_t rank, float scale, const Rotation& rotation,
                               Spans spans, float* out) {
    const Call call(*this);
    const int64_t tokens = spans.back().stop, rope = int64_t(rotation.frequencies.size()) * 2, dim = rank + rope;
    const float* table = angles(rotation, spans, tokens);
    float* query = reinterpret_cast<float*>(scratch(kFirst, size_t(tokens * heads * dim) * 4));
    float* key = reinterpret_cast<float*>(scratch(kSecond, size_t(dim) * 4));
    over_tokens(tokens, [&](int64_t first, int64_t last, int) {
        for (int64_t i = first * heads; i < last * heads; ++i) {
            std::memcpy(query + i * dim, q_latent + i * rank, size_t(rank) * 4);
            std::memcpy(query + i * dim + rank, q_rope + i * q_stride, size_t(rope) * 4);
            rotate(rotation, table, i / heads, query + i * dim + rank);
        }
    });
    for (const auto& span : spans) {
        const int64_t element = span.dtype == Dtype::f32 ? 4 : 2;
        for (int64_t t = span.start; t < span.stop; ++t) {
            k_->rms_norm(kv + t * dim, norm, eps, rank, key);
            std::memcpy(key + rank, kv + t * dim + rank, size_t(rope) * 4);
            rotate(rotation, table, t, key + rank);
            append(key, dim, span.dtype, Span::row(span.first, span.position + t - span.start, dim * element));
        }
        attend({query + span.start * heads * dim, out + span.start * heads * rank, span.first, span.first, dim, dim, heads, 1, dim,
                rank, span.position, scale, span.dtype},
               span.stop - span.start);
    }
}

// A key head at a time with the value heads that share it: convolution of its channels, then the delta rule.
void Machine::delta_net(const float* qkv, const float* z, const float* a, const float* b, const float* conv, const float* a_log,
                        const float* dt_bias, const float* norm, float eps, const DeltaShape& s, Spans spans, float* out) {
    const Call call(*this);
    const int64_t tokens = spans.back().stop, channels = s.channels(), ratio = s.heads / s.key_heads;
    float* mixed = reinterpret_cast<float*>(scratch(kFirst, size_t(tokens * channels) * 4));
    float* gates = reinterpret_cast<float*>(scratch(kSecond, size_t(tokens * s.heads) * 8));
    float *decay = gates, *beta = gates + tokens * s.heads;
    k_->sigmoid(b, tokens * s.heads, beta);
    const int64_t value_width = s.heads * s.value_dim, per_key = ratio * s.value_dim;
    for (const auto& span : spans) {
        const int64_t n = span.stop - span.start;
        const DeltaSpan one = {mixed + span.start * channels,
                               z + span.start * value_width,
                               decay + span.start * s.heads,
                               beta + span.start * s.heads,
                               norm,
                               span.delta,
                               out + span.start * value_width,
                               n,
                               channels,
                               s.key_heads,
                               s.heads,
                               s.key_dim,
                               s.value_dim,
                               value_width,
                               eps};
        pool_.run(s.key_heads, [&](int64_t g, int) {
            const auto convolve = [&](int64_t first, int64_t count) {
                k_->convolve(qkv + span.start * channels, n, channels, conv, s.width, span.conv, first, first + count,
                             mixed + span.start * channels);
            };
            convolve(g * s.key_dim, s.key_dim);
            convolve((s.key_heads + g) * s.key_dim, s.key_dim);
            convolve(2 * s.key_heads * s.key_dim + g * per_key, per_key);
            k_->delta_keys(mixed + span.start * channels, n, channels, s.key_heads, s.key_dim, g);
            for (int64_t head = g * ratio; head < (g + 1) * ratio; ++head) {
                for (int64_t t = span.start; t < span.stop; ++t) {
                    const float x = a[t * s.heads + head] + dt_bias[head];
                    const float softplus = (x > 0 ? x : 0.0f) + std::log1p(std::exp(-std::fabs(x)));  // stable for any x
                    decay[t * s.heads + head] = std::exp(-std::exp(a_log[head]) * softplus);
                }
                k_->delta_head(one, head);
            }
        });
    }
}

}  // namespace moeflux
