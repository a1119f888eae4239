// The machine's routers and experts.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "buffers.h"

namespace moeflux {

namespace {

constexpr int64_t kTurnPairs = 2048;  // of token and expert at a time: what lies between their matrices costs little memory

}  // namespace

bool Machine::route(float* logits, const float* bias, int64_t tokens, const RouterShape& s, int64_t* ids, float* weights) {
    const Call call(*this);
    const size_t each = size_t(s.experts + 2 * s.groups);
    float* base = reinterpret_cast<float*>(scratch(kFirst, each * 4 * size_t(threads())));
    std::atomic<bool> finite = true;
    over_tokens(tokens, [&](int64_t first, int64_t last, int worker) {
        if (!route_some(logits, bias, first, last, s, base + each * size_t(worker), ids, weights)) finite = false;
    });
    return finite;
}

// `work`: a float for each expert, two for each group.
bool Machine::route_some(float* logits, const float* bias, int64_t first, int64_t last, const RouterShape& s, float* work,
                         int64_t* ids, float* weights) const {
    float *chosen_by = work, *groups = chosen_by + s.experts, *kept = groups + s.groups;
    for (int64_t t = first; t < last; ++t) {
        float* scores = logits + t * s.experts;
        for (int64_t e = 0; e < s.experts; ++e)
            if (!std::isfinite(scores[e])) return false;
        if (s.sigmoid) {
            k_->sigmoid(scores, s.experts, scores);
            for (int64_t e = 0; e < s.experts; ++e) chosen_by[e] = scores[e] + bias[e];
            const int64_t size = s.experts / s.groups;
            for (int64_t g = 0; g < s.groups; ++g) {  // a group counts its two best experts
                float best = -INFINITY, second = -INFINITY;
                for (int64_t e = g * size; e < (g + 1) * size; ++e) {
                    const float c = chosen_by[e];
                    if (c > best) second = best, best = c;
                    else if (c > second) second = c;
                }
                groups[g] = best + second;
            }
            std::fill(kept, kept + s.groups, 0.0f);
            for (int64_t i = 0; i < s.top_groups; ++i) {
                int64_t best = -1;
                for (int64_t g = 0; g < s.groups; ++g)
                    if (!kept[g] && (best < 0 || groups[g] > groups[best])) best = g;
                if (best >= 0) kept[best] = 1;
            }
            for (int64_t e = 0; e < s.experts; ++e)
                if (!kept[e / size]) chosen_by[e] = -INFINITY;
        } else {
            k_->softmax(scores, s.experts);
            std::copy(scores, scores + s.experts, chosen_by);
        }
        float sum = 0;
        for (int64_t rank = 0; rank < s.k; ++rank) {  // score descending, index ascending
            int64_t best = -1;
            for (int64_t e = 0; e < s.experts; ++e)
                if (!std::isnan(chosen_by[e]) && (best < 0 || chosen_by[e] > chosen_by[best])) best = e;
            ids[t * s.k + rank] = best;
            weights[t * s.k + rank] = scores[best];
            sum += scores[best];
            chosen_by[best] = NAN;  // taken
        }
        const float divisor = s.normalize ? sum + (s.sigmoid ? 1e-20f : 0.0f) : 1.0f;
        for (int64_t rank = 0; rank < s.k; ++rank) weights[t * s.k + rank] = weights[t * s.k + rank] / divisor * s.scale;
    }
    return true;
}

// Pairs (token, rank) that chose a ready expert, grouped by expert: shares_[e] is where those of expert e begin.
int64_t Machine::group_pairs(const int64_t* ids, int64_t n, Experts ready) {
    int64_t last = -1;
    for (const Expert& expert : ready) last = std::max(last, expert.id);
    place_.assign(size_t(last + 1), -1);
    for (size_t e = 0; e < ready.size(); ++e) place_[size_t(ready[e].id)] = int64_t(e);
    const auto place = [&](int64_t id) { return id <= last ? place_[size_t(id)] : -1; };
    shares_.assign(ready.size() + 2, 0);
    for (int64_t i = 0; i < n; ++i)
        if (const int64_t e = place(ids[i]); e >= 0) ++shares_[size_t(e) + 2];
    for (size_t e = 2; e < shares_.size(); ++e) shares_[e] += shares_[e - 1];
    pairs_.resize(size_t(shares_.back()));
    for (int64_t i = 0; i < n; ++i)
        if (const int64_t e = place(ids[i]); e >= 0) pairs_[size_t(shares_[size_t(e) + 1]++)] = i;
    return shares_.back();
}

// Rows of one turn of `experts`: one for each pair, then one for each token of the shared expert. Pointers into scratch.
struct Machine::Inner {
    Experts ready;
    const int64_t* shares;  // of these experts
    const int64_t* pairs;   // those of this turn
    const SharedExpert* shared;
    int64_t from, tokens, n_pairs, n_shared, most_tokens = 1;
    const uint8_t **gate_in = nullptr, **up_in = nullptr, **down_in = nullptr;  // records
    float **gate_out = nullptr, **up_out = nullptr, **down_out = nullptr, **opened_out = nullptr;
    float* opened = nullptr;  // what the shared expert's output is multiplied with, per token

    int64_t rows() const { return n_pairs + n_shared; }
    int64_t first(size_t e) const { return std::max(shares[e] - from, int64_t(0)); }
    int64_t count(size_t e) const { return std::min(shares[e + 1] - from, n_pairs) - first(e); }
    const Matrix& down(int64_t row) const { return row < n_pairs ? *ready[0].down : *shared->down; }
};

// Pairs from `from` on: those of as many whole experts as a turn takes, or a part of one.
Machine::Inner Machine::lay_out(int64_t from, Experts ready, int64_t tokens, const SharedExpert* shared) {
    size_t first = 0;
    while (first < ready.size() && shares_[first + 1] <= from) ++first;
    size_t end = first;
    while (end < ready.size() && shares_[end + 1] - from <= kTurnPairs) ++end;
    if (end == first && first < ready.size()) ++end;
    const int64_t n_pairs = std::min(shares_[end] - from, kTurnPairs);
    ready = ready.subspan(first, end - first);
    Inner in = {ready, shares_.data() + first, pairs_.data() + from, shared, from, tokens, n_pairs, shared ? tokens : 0};
    const int64_t width = ready.empty() ? 0 : ready[0].gate->rows, shared_width = shared ? shared->gate->rows : 0;
    const int64_t rows = in.rows();
    const size_t bytes = size_t(n_pairs * width + in.n_shared * shared_width) * 4;
    float* gate = reinterpret_cast<float*>(scratch(kFirst, bytes));
    float* up = reinterpret_cast<float*>(scratch(kSecond, bytes));
    in.opened = reinterpret_cast<float*>(scratch(kThird, size_t(in.n_shared) * 4));
    uint8_t* pointers = scratch(kPointers, size_t(rows * 6 + in.n_shared) * sizeof(void*));
    in.gate_in = reinterpret_cast<const uint8_t**>(pointers);
    in.up_in = in.gate_in + rows;
    in.down_in = in.up_in + rows;
    in.gate_out = reinterpret_cast<float**>(pointers) + 3 * rows;
    in.up_out = in.gate_out + rows;
    in.down_out = in.up_out + rows;
    in.opened_out = in.down_out + rows;
    for (int64_t p = 0; p < rows; ++p) {
        const int64_t at = p < n_pairs ? p * width : n_pairs * width + (p - n_pairs) * shared_width;
        in.gate_out[p] = gate + at;
        in.up_out[p] = up + at;
    }
    for (size_t e = 0; e < ready.size(); ++e) in.most_tokens = std::max(in.most_tokens, in.count(e));
    return in;
}

void Machine::add_gates_and_ups(const Inner& in, RecordKinds& kinds, int64_t k) {
    if (in.n_pairs) {
        const auto *for_gate = kinds.of(*in.ready[0].gate), *for_up = kinds.of(*in.ready[0].up);
        for (int64_t p = 0; p < in.n_pairs; ++p) {
            in.gate_in[p] = for_gate[in.pairs[p] / k];
            in.up_in[p] = for_up[in.pairs[p] / k];
        }
    }
    for (size_t e = 0; e < in.ready.size(); ++e) {
        const int64_t first = in.first(e), count = in.count(e);
        if (count == 0) continue;
        const Matrix &gate = *in.ready[e].gate, &up = *in.ready[e].up;
        add_piece(gate, layout(gate), in.gate_in + first, in.gate_out + first, count, in.most_tokens);
        add_piece(up, layout(up), in.up_in + first, in.up_out + first, count, in.most_tokens);
    }
    if (!in.shared) return;
    const Matrix &gate = *in.shared->gate, &up = *in.shared->up;
    add_piece(gate, layout(gate), kinds.of(gate), in.gate_out + in.n_pairs, in.tokens, in.tokens);
    add_piece(up, layout(up), kinds.of(up), in.up_out + in.n_pairs, in.tokens, in.tokens);
    if (const Matrix* m = in.shared->output_gate) add_piece(*m, layout(*m), kinds.of(*m), in.opened_out, in.tokens, in.tokens);
}

void Machine::add_downs(const Inner& in) {
    for (size_t e = 0; e < in.ready.size(); ++e) {
        const Matrix& down = *in.ready[e].down;
        const int64_t first = in.first(e), count = in.count(e);
        if (count) add_piece(down, layout(down), in.down_in + first, in.down_out + first, count, in.most_tokens);
    }
    if (in.shared)
        add_piece(*in.shared->down, layout(*in.shared->down), in.down_in + in.n_pairs, in.down_out + in.n_pairs, in.tokens,
                  in.tokens);
}

// silu(gate) * up of every row as the records that the down matrices want.
void Machine::activate(const Inner& in) {
    const auto size = [&](const Matrix& down) { return record_bytes(layout(down), down.cols, down.group); };
    const size_t own = in.n_pairs ? size(*in.ready[0].down) : 0, shared = in.shared ? size(*in.shared->down) : 0;
    uint8_t* records = scratch(kInner, size_t(in.n_pairs) * own + size_t(in.n_shared) * shared);
    const int64_t rows = in.rows(), per_chunk = rows > 16 ? 8 : rows;
    pool_.run(ceil_div(rows, per_chunk), [&](int64_t chunk, int) {
        for (int64_t p = chunk * per_chunk; p < std::min(rows, (chunk + 1) * per_chunk); ++p) {
            const Matrix& down = in.down(p);
            uint8_t* record = records + size_t(std::min(p, in.n_pairs)) * own + size_t(std::max<int64_t>(0, p - in.n_pairs)) * shared;
            in.down_in[p] = record;
            if (layout(down) == Layout::floats) {
                k_->silu_mul(in.gate_out[p], in.up_out[p], down.cols, reinterpret_cast<float*>(record));
            } else {
                k_->silu_mul(in.gate_out[p], in.up_out[p], down.cols, in.gate_out[p]);
                k_->quantize(in.gate_out[p], down.cols, down.group, layout(down), record);
            }
        }
    });
}

void Machine::experts(const float* x, int64_t tokens, int64_t hidden, const int64_t* ids, int64_t k, Experts ready,
                      const SharedExpert* shared, float* outputs, Matrices then, bool again) {
    const Call call(*this);
    if (!again) inputs_->start(x, tokens);
    const int64_t n_pairs = group_pairs(ids, tokens * k, ready);
    for (int64_t done = 0; shared || done < n_pairs; shared = nullptr) {
        const Inner in = lay_out(done, ready, tokens, shared);
        done += in.n_pairs;
        run_turn(in, hidden, k, outputs, then);
    }
}

void Machine::run_turn(const Inner& in, int64_t hidden, int64_t k, float* outputs, Matrices then) {
    const SharedExpert* shared = in.shared;
    for (int64_t p = 0; p < in.n_pairs; ++p) in.down_out[p] = outputs + in.pairs[p] * hidden;
    for (int64_t t = 0; t < in.n_shared; ++t) {
        in.down_out[in.n_pairs + t] = shared->y + t * hidden;
        in.opened_out[t] = in.opened + t;
    }
    if (in.tokens == 1) {
        add_downs(in);
        expect_pieces();
    }
    add_gates_and_ups(in, *inputs_, k);
    run_pieces();
    activate(in);
    if (in.tokens == 1) expect(then);
    add_downs(in);
    run_pieces();
    if (!shared || !shared->output_gate) return;
    k_->sigmoid(in.opened, in.tokens, in.opened);
    over_tokens(in.tokens, [&](int64_t first, int64_t last, int) {
        for (int64_t t = first; t < last; ++t)
            for (int64_t i = 0; i < hidden; ++i) shared->y[t * hidden + i] *= in.opened[t];
    });
}

void Machine::combine(const float* outputs, const float* weights, int64_t tokens, int64_t k, int64_t hidden, float* y) {
    const Call call(*this);
    over_tokens(tokens, [&](int64_t first, int64_t last, int) {
        for (int64_t t = first; t < last; ++t) {
            std::memset(y + t * hidden, 0, size_t(hidden) * 4);
            for (int64_t rank = 0; rank < k; ++rank)
                k_->axpy(weights[t * k + rank], outputs + (t * k + rank) * hidden, hidden, y + t * hidden);
        }
    });
}

}  // namespace moeflux
