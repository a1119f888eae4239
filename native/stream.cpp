#include "stream.h"

#include <algorithm>

namespace moeflux {

Stream::Stream(std::shared_ptr<Store> store, Machine& machine, PredictOptions options)
    : store_(std::move(store)), machine_(machine), predictor_(size_t(store_->n_layers()), options) {}

void Stream::start(std::span<const Step> steps) {
    steps_ = steps;
    sweep_ = false;
    decoding_.clear();
    for (const Span& span : steps.front().spans) {
        sweep_ = sweep_ || !span.decodes;
        for (int64_t row = span.start; span.decodes && row < span.stop; ++row) decoding_.push_back(row);
    }
    routed_.clear();
    started_ = std::chrono::steady_clock::now();
    at_start_ = store_->stats();
    const bool missing = at_start_.bytes_resident < store_->n_bytes();
    predictor_.start(sweep_, missing, store_->next_token());
}

void Stream::finish() {
    lease_ = Lease();
    const auto stats = store_->stats();
    const double ns = std::max(1.0, double((std::chrono::steady_clock::now() - started_).count()));
    const double reading = double(stats.read_ns - at_start_.read_ns) / (ns * store_->depth());
    predictor_.finish(stats.hints_issued - at_start_.hints_issued, stats.hints_useful - at_start_.hints_useful,
                      1.0 - std::min(1.0, reading), double(stats.stall_ns - at_start_.stall_ns) / ns);
}

void Stream::listen() {
    listener_->listen();
    if (store_->closed()) throw store_->closed_error();
}

void Stream::before(size_t layer, const float* x, int64_t tokens) {
    for (const Look& one : predictor_.before(layer)) look(one, x, tokens);
}

void Stream::begin(size_t layer, const int64_t* ids, int64_t n) {
    layer_ = layer;
    hinted_ahead_ = false;
    if (recording_) routed_.insert(routed_.end(), ids, ids + n);
    ready_.clear();
    backlog_.clear();
    acquire(layer, ids, n);
}

// Decoding rows first: what they ask for is worth keeping, also beside a prompt.
void Stream::acquire(size_t layer, const int64_t* ids, int64_t n) {
    const int64_t k = steps_[layer].layer->routing.k;
    const auto& own = predictor_.chose(layer, ids, n, decoding_, k);
    const int64_t n_own = int64_t(decoding_.size()) * k;
    if (n_own == 0 || n_own == n) {
        lease_ = store_->acquire(int(layer), ids, n, n - n_own);
        return;
    }
    ids_ = own;
    size_t next = 0;
    for (int64_t row = 0; row < n / k; ++row) {
        if (next < decoding_.size() && decoding_[next] == row) ++next;
        else ids_.insert(ids_.end(), ids + row * k, ids + (row + 1) * k);
    }
    lease_ = store_->acquire(int(layer), ids_.data(), n, n - n_own);
}

void Stream::meanwhile(size_t layer, const float* x, int64_t tokens) {
    for (const Look& one : predictor_.meanwhile(layer)) look(one, x, tokens);
}

void Stream::look(const Look& look, const float* x, int64_t tokens) {
    if (look.layer >= steps_.size() || !steps_[look.layer].layer->moe()) return;
    const RouterShape& routing = steps_[look.layer].layer->routing;
    switch (look.at) {
        case Look::kRouter:
            if (look_ahead(look.layer, x, tokens, std::min(look.width, routing.experts)))
                hint(look.layer, predictor_.guesses(look.layer), false, look.soon);
            return;
        case Look::kPrevious: return hint(look.layer, predictor_.previous(look.layer, routing.k), false, look.soon);
        case Look::kPrompt: look_ahead(look.layer, x, tokens, routing.k);
    }
}

void Stream::hint(size_t layer, std::span<const int64_t> ids, bool sweep, bool soon) {
    if (!ids.empty()) store_->hint(int(layer), ids.data(), int64_t(ids.size()), sweep, soon);
}

// The router of a later layer applied to the hidden states of now, which the layers in between change little. False where a
// score is not finite.
bool Stream::look_ahead(size_t layer, const float* x, int64_t tokens, int64_t k) {
    const Layer& l = *steps_[layer].layer;
    const int64_t rows = std::min(tokens, kRows);
    float *h = machine_.floats(11, rows * l.hidden), *logits = machine_.floats(12, rows * l.router.rows);
    float* weights = machine_.floats(13, rows * k);
    for (int64_t row = 0; row < rows; ++row)
        machine_.rms_norm(x + row * tokens / rows * l.hidden, l.ffn_norm, l.eps, 1, l.hidden, h + row * l.hidden);
    machine_.linears(h, rows, {&l.router}, {logits});
    RouterShape shape = l.routing;
    shape.k = k;
    auto& guesses = predictor_.guesses(layer);
    guesses.resize(size_t(rows * k));
    const bool finite = machine_.route(logits, l.router_bias, rows, shape, guesses.data(), weights);
    if (!finite) guesses.clear();
    return finite;
}

// A prompt's next layer. Its experts get slots that this layer has done with, so this comes when all of its own have one, and
// again when it has ended.
void Stream::hint_ahead() {
    const auto guesses = predictor_.ahead(layer_ + 1);
    if (guesses.empty()) return;
    hint(layer_ + 1, guesses, true, false);
    hinted_ahead_ = true;
}

Experts Stream::next() {
    lease_.release(ready_);  // what this layer still waits for may need the slots
    ready_.clear();
    if (!sweep_) {
        lease_.next(ready_, true, listener_);
        return ready_;
    }
    if (!hinted_ahead_ && lease_.waiting() == 0) hint_ahead();
    // Arrivals first, because their slots are wanted for what comes next.
    lease_.next(arrived_, backlog_.empty(), listener_);
    for (const Expert& expert : arrived_) backlog_.push_back(expert);
    const size_t n = std::min(backlog_.size(), kBatch);
    ready_.assign(backlog_.end() - ptrdiff_t(n), backlog_.end());
    backlog_.resize(backlog_.size() - n);
    return ready_;
}

void Stream::end() {
    lease_ = Lease();
    if (sweep_) hint_ahead();
}

}  // namespace moeflux
