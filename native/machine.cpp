#include "machine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace moeflux {

namespace {

// Scratch buffers by use; two calls never hold the same one.
enum : size_t {
    kRecords = 0,  // and the next three, for up to four layouts
    kPointers = 4,
    kOutputs = 5,
    kFirst = 6,
    kSecond = 7,
    kThird = 8,
    kAngles = 9,
    kSums = 10,
    kBlock = 11,  // and the next seven
    kBuffers = 19,
};

constexpr int64_t kStreamBytes = 64 << 10;  // of codes, that one thread reads at a time

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows per chunk: whole tiles of the kernels, long enough to stream, short enough that the threads end together.
int64_t rows_per_chunk(const Matrix& m, int64_t tokens, int threads) {
    const int64_t tile = tokens <= 4 ? 16 : 64, bytes = tokens <= 4 ? kStreamBytes : 128 << 10;
    const int64_t wanted = bytes / int64_t(row_bytes(m)) / tile * tile;
    const int64_t most = ceil_div(m.rows, 4 * threads) / tile * tile;
    return std::max(tile, std::min(wanted, most));
}

}  // namespace

Machine::Machine(int threads, const Kernels* kernels, bool exact, bool poison)
    : pool_(threads), k_(kernels), exact_(exact), poison_(poison), buffers_(kBuffers) {
    for (int i = 0; i < threads; ++i) workspaces_.push_back(std::make_unique<Block>(k_->workspace_bytes()));
}

uint8_t* Machine::scratch(size_t which, size_t bytes) {
    auto& block = buffers_[which].block;
    buffers_[which].most = std::max(buffers_[which].most, bytes);
    if (!block || block->size() < bytes) {
        block.reset();
        block = std::make_unique<Block>(bytes + bytes / 4 + 64);
    }
    if (poison_) std::memset(block->data(), 0xFF, block->size());  // as floats, NaN
    return block->data();
}

size_t Machine::scratch_bytes() const {
    size_t total = 0;
    for (const Buffer& buffer : buffers_) total += buffer.most;
    return total;
}

float* Machine::floats(size_t which, int64_t n) { return reinterpret_cast<float*>(scratch(kBlock + which, size_t(n) * 4)); }

void Machine::add(const float* a, const float* b, int64_t n, float* y) {
    const Call call(*this);
    k_->add(a, b, n, y);
}

const uint8_t* const* Machine::records(const float* x, int64_t tokens, int64_t cols, Layout layout, int group, size_t which) {
    const size_t bytes = record_bytes(layout, cols, group);
    const size_t pointer_bytes = size_t(tokens) * sizeof(uint8_t*);
    const size_t data_at = (pointer_bytes + 63) / 64 * 64;
    uint8_t* base = scratch(which, data_at + (layout == Layout::floats ? 0 : size_t(tokens) * bytes));
    auto** pointers = reinterpret_cast<const uint8_t**>(base);
    if (layout == Layout::floats) {
        for (int64_t t = 0; t < tokens; ++t) pointers[t] = reinterpret_cast<const uint8_t*>(x + t * cols);
        return pointers;
    }
    for (int64_t t = 0; t < tokens; ++t) pointers[t] = base + data_at + size_t(t) * bytes;
    const int64_t per_chunk = tokens > 8 ? 4 : tokens;
    pool_.run(ceil_div(tokens, per_chunk), [&](int64_t chunk, int) {
        const int64_t end = std::min(tokens, (chunk + 1) * per_chunk);
        for (int64_t t = chunk * per_chunk; t < end; ++t)
            k_->quantize(x + t * cols, cols, group, layout, base + data_at + size_t(t) * bytes);
    });
    return pointers;
}

void Machine::linears(const float* x, int64_t tokens, const std::vector<const Matrix*>& matrices, const std::vector<float*>& y) {
    const Call call(*this);
    struct Job {
        const Matrix* matrix;
        Layout layout;
        const uint8_t* const* records;
        float** y;
        int64_t first_chunk, per_chunk;
    };
    Job jobs[8];
    const size_t n = matrices.size();
    auto** pointers = reinterpret_cast<float**>(scratch(kPointers, n * size_t(tokens) * sizeof(float*)));
    size_t made = 0;
    int64_t chunks = 0;
    for (size_t i = 0; i < n; ++i) {
        const Matrix& m = *matrices[i];
        Job& job = jobs[i];
        job = {&m, layout(m), nullptr, pointers + i * size_t(tokens), chunks, rows_per_chunk(m, tokens, threads())};
        for (size_t j = 0; j < i && !job.records; ++j)
            if (jobs[j].layout == job.layout && (job.layout == Layout::floats || jobs[j].matrix->group == m.group))
                job.records = jobs[j].records;
        if (!job.records) job.records = records(x, tokens, m.cols, job.layout, m.group, kRecords + made++);
        for (int64_t t = 0; t < tokens; ++t) job.y[t] = y[i] + t * m.rows;
        chunks += ceil_div(m.rows, job.per_chunk);
    }
    const auto find = [&](int64_t chunk) -> const Job& {
        size_t i = n - 1;
        while (jobs[i].first_chunk > chunk) --i;
        return jobs[i];
    };
    pool_.run_ahead(chunks, [&](int64_t chunk, int64_t after, int worker) {
        const Job& job = find(chunk);
        const int64_t first = (chunk - job.first_chunk) * job.per_chunk;
        const int64_t last = std::min(job.matrix->rows, first + job.per_chunk);
        Next next;
        if (after >= 0) {
            const Job& other = find(after);
            if (other.layout == job.layout) next = {other.matrix, (after - other.first_chunk) * other.per_chunk};
        }
        k_->rows(*job.matrix, job.layout, job.records, tokens, job.y, first, last, next, workspace(worker));
    });
}

void Machine::head_linear(const float* x, int64_t tokens, const HeadMatrix& w, float* y) {
    const Call call(*this);
    const int64_t cols = w.matrix.cols;
    const int64_t n_in = w.transposed ? w.rows : cols, n_out = w.transposed ? cols : w.rows;
    pool_.run(w.heads, [&](int64_t h, int worker) {
        float* row = reinterpret_cast<float*>(workspace(worker));
        if (w.transposed)
            for (int64_t t = 0; t < tokens; ++t) std::memset(y + (t * w.heads + h) * n_out, 0, size_t(n_out) * 4);
        for (int64_t r = 0; r < w.rows; ++r) {
            k_->decode_row(w.matrix, h * w.stride + w.first + r, row);
            for (int64_t t = 0; t < tokens; ++t) {
                const float* in = x + (t * w.heads + h) * n_in;
                float* out = y + (t * w.heads + h) * n_out;
                if (w.transposed) k_->axpy(in[r], row, cols, out);
                else out[r] = k_->dot(row, in, cols);
            }
        }
    });
}

void Machine::embed(const Matrix& table, const int64_t* ids, int64_t tokens, float* y) {
    const Call call(*this);
    for (int64_t t = 0; t < tokens; ++t) k_->decode_row(table, ids[t], y + t * table.cols);
}

void Machine::rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* y) {
    const Call call(*this);
    for (int64_t r = 0; r < rows; ++r) k_->rms_norm(x + r * n, weight, eps, n, y + r * n);
}

void Machine::add_norm(const float* a, const float* b, const float* weight, float eps, int64_t rows, int64_t n, float* sum,
                       float* y) {
    const Call call(*this);
    for (int64_t r = 0; r < rows; ++r) {
        k_->add(a + r * n, b + r * n, n, sum + r * n);
        k_->rms_norm(sum + r * n, weight, eps, n, y + r * n);
    }
}

void Machine::mlp(const float* x, int64_t tokens, const Matrix& gate, const Matrix& up, const Matrix& down,
                  const Matrix* output_gate, float* y) {
    const Call call(*this);
    const size_t size = size_t(tokens * gate.rows);
    float* g = reinterpret_cast<float*>(scratch(kFirst, size * 4));
    float* u = reinterpret_cast<float*>(scratch(kSecond, size * 4));
    float* opened = reinterpret_cast<float*>(scratch(kThird, size_t(tokens) * 4));
    if (output_gate) linears(x, tokens, {&gate, &up, output_gate}, {g, u, opened});
    else linears(x, tokens, {&gate, &up}, {g, u});
    k_->silu_mul(g, u, tokens * gate.rows, g);
    linears(g, tokens, {&down}, {y});
    if (!output_gate) return;
    k_->sigmoid(opened, tokens, opened);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < down.rows; ++i) y[t * down.rows + i] *= opened[t];
}

const float* Machine::angles(const Rotation& r, const std::vector<KvSpan>& spans, int64_t tokens) {
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
    const size_t work = (attend_work(per_block, span.value_dim) + 15) / 16 * 16;
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
                        const AttentionShape& s, const Rotation& rotation, const std::vector<KvSpan>& spans, float* out) {
    const Call call(*this);
    const int64_t tokens = spans.back().stop, q_width = s.gated ? 2 * s.dim : s.dim;
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
        for (int64_t t = span.start; t < span.stop; ++t) {
            const int64_t at = (span.position + t - span.start) * row * element;
            append(key + t * row, row, span.dtype, span.keys + at);
            append(v + t * row, row, span.dtype, span.values + at);
        }
        attend({rotated + span.start * s.heads * s.dim, out + span.start * s.heads * s.dim, span.keys, span.values, row, row,
                s.heads, s.groups, s.dim, s.dim, span.position, 1.0f / std::sqrt(float(s.dim)), span.dtype},
               span.stop - span.start);
    }
    if (!s.gated) return;
    for (int64_t i = 0; i < tokens * s.heads; ++i) k_->sigmoid_mul(q + i * q_width + s.dim, s.dim, out + i * s.dim);
}

void Machine::latent_attention(const float* q_latent, const float* q_rope, int64_t q_stride, const float* kv, const float* norm,
                               float eps, int64_t heads, int64_t rank, float scale, const Rotation& rotation,
                               const std::vector<KvSpan>& spans, float* out) {
    const Call call(*this);
    const int64_t tokens = spans.back().stop, rope = int64_t(rotation.frequencies.size()) * 2, dim = rank + rope;
    const float* table = angles(rotation, spans, tokens);
    float* query = reinterpret_cast<float*>(scratch(kFirst, size_t(tokens * heads * dim) * 4));
    float* key = reinterpret_cast<float*>(scratch(kSecond, size_t(dim) * 4));
    for (int64_t i = 0; i < tokens * heads; ++i) {
        std::memcpy(query + i * dim, q_latent + i * rank, size_t(rank) * 4);
        std::memcpy(query + i * dim + rank, q_rope + i * q_stride, size_t(rope) * 4);
        rotate(rotation, table, i / heads, query + i * dim + rank);
    }
    for (const auto& span : spans) {
        const int64_t element = span.dtype == Dtype::f32 ? 4 : 2;
        for (int64_t t = span.start; t < span.stop; ++t) {
            k_->rms_norm(kv + t * dim, norm, eps, rank, key);
            std::memcpy(key + rank, kv + t * dim + rank, size_t(rope) * 4);
            rotate(rotation, table, t, key + rank);
            append(key, dim, span.dtype, span.keys + (span.position + t - span.start) * dim * element);
        }
        attend({query + span.start * heads * dim, out + span.start * heads * rank, span.keys, span.keys, dim, dim, heads, 1, dim,
                rank, span.position, scale, span.dtype},
               span.stop - span.start);
    }
}

void Machine::delta_net(const float* qkv, const float* z, const float* a, const float* b, const float* conv, const float* a_log,
                        const float* dt_bias, const float* norm, float eps, const DeltaShape& s,
                        const std::vector<DeltaStateSpan>& spans, float* out) {
    const Call call(*this);
    const int64_t tokens = spans.back().stop, channels = s.channels();
    float* mixed = reinterpret_cast<float*>(scratch(kFirst, size_t(tokens * channels) * 4));
    float* gates = reinterpret_cast<float*>(scratch(kSecond, size_t(tokens * s.heads) * 8));
    float *decay = gates, *beta = gates + tokens * s.heads;
    for (int64_t i = 0; i < tokens * s.heads; ++i) {
        const float x = a[i] + dt_bias[i % s.heads];
        const float softplus = (x > 0 ? x : 0.0f) + std::log1p(std::exp(-std::fabs(x)));  // stable for any x
        decay[i] = std::exp(-std::exp(a_log[i % s.heads]) * softplus);
    }
    k_->sigmoid(b, tokens * s.heads, beta);
    const size_t work = size_t(2 * s.key_dim + s.value_dim + 15) / 16 * 16;
    float* base = reinterpret_cast<float*>(scratch(kThird, work * 4 * size_t(threads())));
    const int64_t per_chunk = 512;
    for (const auto& span : spans) {
        const int64_t n = span.stop - span.start;
        pool_.run(ceil_div(channels, per_chunk), [&](int64_t chunk, int) {
            k_->convolve(qkv + span.start * channels, n, channels, conv, s.width, span.conv, chunk * per_chunk,
                         std::min(channels, (chunk + 1) * per_chunk), mixed + span.start * channels);
        });
        const DeltaSpan one = {mixed + span.start * channels,
                               z + span.start * s.heads * s.value_dim,
                               decay + span.start * s.heads,
                               beta + span.start * s.heads,
                               norm,
                               span.delta,
                               out + span.start * s.heads * s.value_dim,
                               n,
                               channels,
                               s.key_heads,
                               s.heads,
                               s.key_dim,
                               s.value_dim,
                               s.heads * s.value_dim,
                               eps};
        pool_.run(s.heads, [&](int64_t head, int worker) { k_->delta_head(one, head, base + work * size_t(worker)); });
    }
}

bool Machine::route(float* logits, const float* bias, int64_t tokens, const RouterShape& s, int64_t* ids, float* weights) {
    const Call call(*this);
    std::vector<float> chosen_by(size_t(s.experts)), groups(size_t(s.groups));
    std::vector<char> kept(size_t(s.groups));
    for (int64_t t = 0; t < tokens; ++t) {
        float* scores = logits + t * s.experts;
        for (int64_t e = 0; e < s.experts; ++e)
            if (!std::isfinite(scores[e])) return false;
        if (s.sigmoid) {
            k_->sigmoid(scores, s.experts, scores);
            for (int64_t e = 0; e < s.experts; ++e) chosen_by[size_t(e)] = scores[e] + bias[e];
            const int64_t size = s.experts / s.groups;
            for (int64_t g = 0; g < s.groups; ++g) {  // a group counts its two best experts
                float best = -INFINITY, second = -INFINITY;
                for (int64_t e = g * size; e < (g + 1) * size; ++e) {
                    const float c = chosen_by[size_t(e)];
                    if (c > best) second = best, best = c;
                    else if (c > second) second = c;
                }
                groups[size_t(g)] = best + second;
            }
            std::fill(kept.begin(), kept.end(), char(0));
            for (int64_t i = 0; i < s.top_groups; ++i) {
                int64_t best = -1;
                for (int64_t g = 0; g < s.groups; ++g)
                    if (!kept[size_t(g)] && (best < 0 || groups[size_t(g)] > groups[size_t(best)])) best = g;
                if (best >= 0) kept[size_t(best)] = 1;
            }
            for (int64_t e = 0; e < s.experts; ++e)
                if (!kept[size_t(e / size)]) chosen_by[size_t(e)] = -INFINITY;
        } else {
            k_->softmax(scores, s.experts);
            std::copy(scores, scores + s.experts, chosen_by.begin());
        }
        float sum = 0;
        for (int64_t rank = 0; rank < s.k; ++rank) {  // score descending, index ascending
            int64_t best = -1;
            for (int64_t e = 0; e < s.experts; ++e)
                if (!std::isnan(chosen_by[size_t(e)]) && (best < 0 || chosen_by[size_t(e)] > chosen_by[size_t(best)])) best = e;
            ids[t * s.k + rank] = best;
            weights[t * s.k + rank] = scores[best];
            sum += scores[best];
            chosen_by[size_t(best)] = NAN;  // taken
        }
        const float divisor = s.normalize ? sum + (s.sigmoid ? 1e-20f : 0.0f) : 1.0f;
        for (int64_t rank = 0; rank < s.k; ++rank) weights[t * s.k + rank] = weights[t * s.k + rank] / divisor * s.scale;
    }
    return true;
}

void Machine::experts(const float* x, int64_t tokens, int64_t hidden, const int64_t* ids, int64_t k,
                      const std::vector<Expert>& ready, float* outputs) {
    const Call call(*this);
    if (ready.empty()) return;
    const Matrix& first_gate = *ready[0].gate;
    const int64_t width = first_gate.rows;
    const Layout in_layout = layout(first_gate), up_layout = layout(*ready[0].up), down_layout = layout(*ready[0].down);
    const auto* token_records = records(x, tokens, hidden, in_layout, first_gate.group, kRecords);
    const auto* up_records = up_layout == in_layout && ready[0].up->group == first_gate.group
                                 ? token_records
                                 : records(x, tokens, hidden, up_layout, ready[0].up->group, kRecords + 1);

    // Every (token, rank) that chose a ready expert, grouped by expert.
    struct Share {
        int64_t first, count;
    };
    std::vector<Share> shares(ready.size());
    std::vector<int64_t> pairs;
    pairs.reserve(size_t(tokens * k));
    for (size_t e = 0; e < ready.size(); ++e) {
        shares[e].first = int64_t(pairs.size());
        for (int64_t i = 0; i < tokens * k; ++i)
            if (ids[i] == ready[e].id) pairs.push_back(i);
        shares[e].count = int64_t(pairs.size()) - shares[e].first;
    }
    const int64_t n = int64_t(pairs.size());
    if (n == 0) return;
    int64_t most_tokens = 0;
    for (const Share& share : shares) most_tokens = std::max(most_tokens, share.count);
    float* gate = reinterpret_cast<float*>(scratch(kFirst, size_t(n * width) * 4));
    float* up = reinterpret_cast<float*>(scratch(kSecond, size_t(n * width) * 4));
    uint8_t* pointers = scratch(kPointers, size_t(n) * 5 * sizeof(void*));
    auto** gate_in = reinterpret_cast<const uint8_t**>(pointers);
    auto** up_in = gate_in + n;
    auto** gate_out = reinterpret_cast<float**>(pointers) + 2 * n;
    auto** up_out = gate_out + n;
    auto** down_out = up_out + n;
    for (int64_t p = 0; p < n; ++p) {
        gate_in[p] = token_records[pairs[size_t(p)] / k];
        up_in[p] = up_records[pairs[size_t(p)] / k];
        gate_out[p] = gate + p * width;
        up_out[p] = up + p * width;
        down_out[p] = outputs + pairs[size_t(p)] * hidden;
    }
    const int64_t rows = rows_per_chunk(first_gate, most_tokens, threads()), blocks = ceil_div(width, rows);
    pool_.run_ahead(int64_t(ready.size()) * blocks * 2, [&](int64_t chunk, int64_t after, int worker) {
        const Expert& expert = ready[size_t(chunk / (2 * blocks))];
        const Share& share = shares[size_t(chunk / (2 * blocks))];
        if (share.count == 0) return;
        const int64_t first = chunk % blocks * rows, last = std::min(width, first + rows);
        Next next;
        if (after >= 0) {
            const Expert& other = ready[size_t(after / (2 * blocks))];
            next = {after % (2 * blocks) < blocks ? other.gate : other.up, after % blocks * rows};
        }
        if (chunk % (2 * blocks) < blocks)
            k_->rows(*expert.gate, in_layout, gate_in + share.first, share.count, gate_out + share.first, first, last, next,
                     workspace(worker));
        else
            k_->rows(*expert.up, up_layout, up_in + share.first, share.count, up_out + share.first, first, last, next,
                     workspace(worker));
    });
    const int group = ready[0].down->group;
    const size_t bytes = record_bytes(down_layout, width, group);
    uint8_t* inner = scratch(kRecords + 2, size_t(n) * bytes);
    auto** inner_in = reinterpret_cast<const uint8_t**>(scratch(kOutputs, size_t(n) * sizeof(void*)));
    const int64_t per_chunk = n > 16 ? 8 : n;
    pool_.run(ceil_div(n, per_chunk), [&](int64_t chunk, int) {
        for (int64_t p = chunk * per_chunk; p < std::min(n, (chunk + 1) * per_chunk); ++p) {
            uint8_t* record = inner + size_t(p) * bytes;
            inner_in[p] = record;
            if (down_layout == Layout::floats) {
                k_->silu_mul(gate_out[p], up_out[p], width, reinterpret_cast<float*>(record));
            } else {
                k_->silu_mul(gate_out[p], up_out[p], width, gate_out[p]);
                k_->quantize(gate_out[p], width, group, down_layout, record);
            }
        }
    });
    const int64_t out_rows = rows_per_chunk(*ready[0].down, most_tokens, threads()), out_blocks = ceil_div(hidden, out_rows);
    pool_.run_ahead(int64_t(ready.size()) * out_blocks, [&](int64_t chunk, int64_t after, int worker) {
        const size_t e = size_t(chunk / out_blocks);
        const Share& share = shares[e];
        if (share.count == 0) return;
        const int64_t first = chunk % out_blocks * out_rows, last = std::min(hidden, first + out_rows);
        Next next;
        if (after >= 0) next = {ready[size_t(after / out_blocks)].down, after % out_blocks * out_rows};
        k_->rows(*ready[e].down, down_layout, inner_in + share.first, share.count, down_out + share.first, first, last, next,
                 workspace(worker));
    });
}

void Machine::experts_all(const float* x, int64_t tokens, int64_t hidden, const int64_t* ids, const float* weights, int64_t k,
                          const std::vector<Expert>& ready, float* y) {
    const Call call(*this);
    float* outputs = reinterpret_cast<float*>(scratch(kSums, size_t(tokens * k * hidden) * 4));
    experts(x, tokens, hidden, ids, k, ready, outputs);
    combine(outputs, weights, tokens, k, hidden, y);
}

double Machine::time_read(const uint8_t* p, size_t n) {
    const Call call(*this);
    constexpr size_t kPiece = size_t(1) << 20;
    std::vector<uint64_t> sums(size_t(threads()) * 8);
    const auto start = std::chrono::steady_clock::now();
    pool_.run(int64_t((n + kPiece - 1) / kPiece), [&](int64_t chunk, int worker) {
        const size_t first = size_t(chunk) * kPiece;
        sums[size_t(worker) * 8] ^= k_->read_all(p + first, std::min(kPiece, n - first));
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double Machine::multiply_rate() {
    const Call call(*this);
    constexpr int64_t kRounds = 200000;
    const int64_t chunks = 4 * threads();
    std::vector<int64_t> done(size_t(threads()) * 8);
    const auto start = std::chrono::steady_clock::now();
    pool_.run(chunks, [&](int64_t, int worker) { done[size_t(worker) * 8] += kRounds * k_->multiply_only(kRounds); });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    int64_t total = 0;
    for (int64_t n : done) total += n;
    return double(total) / seconds;
}

void Machine::combine(const float* outputs, const float* weights, int64_t tokens, int64_t k, int64_t hidden, float* y) {
    const Call call(*this);
    for (int64_t t = 0; t < tokens; ++t) {
        std::memset(y + t * hidden, 0, size_t(hidden) * 4);
        for (int64_t rank = 0; rank < k; ++rank)
            k_->axpy(weights[t * k + rank], outputs + (t * k + rank) * hidden, hidden, y + t * hidden);
    }
}

}  // namespace moeflux
