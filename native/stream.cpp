#include "stream.h"

#include <algorithm>

namespace moeflux {

void Reach::learn(int64_t issued, int64_t useful, double idle, double stalled) {
    issued_ += issued;
    useful_ += useful;
    idle_ += idle;
    stalled_ += stalled;
    if (++tokens_ < kWindow) return;
    const int64_t n = issued_;
    const double share = n > 0 ? double(useful_) / double(n) : 0, spare = idle_ / kWindow;
    const bool waits = stalled_ > 0.02 * kWindow, busy = spare < 0.25;
    const double needed = busy ? 0.6 : 0.35;
    tokens_ = 0;
    idle_ = stalled_ = 0;
    issued_ = useful_ = 0;
    if (width_ == 0) {
        if (++off_ < kProbe) return;
        off_ = 0;
        width_ = std::min(most_, 2);
    } else if (n > 0 && share < needed) {
        if (depth_ > 1) --depth_;
        else width_ /= 2;
    } else if (busy && share < 0.95 && width_ > sure()) {
        --width_;  // what is wrong takes the place of what is right
    } else if (n > 0 && share > needed + 0.2) {
        if (!busy && width_ < most_) ++width_;
        else if (spare > 0.1 && waits && depth_ < kDeepest) ++depth_;
    }
}

Stream::Stream(std::shared_ptr<Store> store, Machine& machine, StreamOptions options)
    : store_(std::move(store)), machine_(machine), options_(options), reach_(options.previous || options.lookahead ? options.most : 0),
      previous_(size_t(store_->n_layers())), guesses_(size_t(store_->n_layers())) {}

void Stream::start(std::span<const Step> steps) {
    steps_ = steps;
    sweep_ = false;
    decoding_.clear();
    for (const Span& span : steps.front().spans) {
        sweep_ = sweep_ || !span.decodes;
        for (int64_t row = span.start; span.decodes && row < span.stop; ++row) decoding_.push_back(row);
    }
    first_ = true;
    routed_.clear();
    started_ = std::chrono::steady_clock::now();
    at_start_ = store_->stats();
    foresee_ = at_start_.bytes_resident < store_->n_bytes();
    crowded_ = store_->next_token();
}

void Stream::finish() {
    lease_ = Lease();
    const auto stats = store_->stats();
    if (sweep_) return;  // prompts have no part in what decoding learns
    const double ns = std::max(1.0, double((std::chrono::steady_clock::now() - started_).count()));
    const double reading = double(stats.read_ns - at_start_.read_ns) / (ns * store_->depth());
    reach_.learn(stats.hints_issued - at_start_.hints_issued, stats.hints_useful - at_start_.hints_useful,
                 1.0 - std::min(1.0, reading), double(stats.stall_ns - at_start_.stall_ns) / ns);
}

void Stream::listen() {
    listener_->listen();
    if (store_->closed()) throw store_->closed_error();
}

// Only the mixer is still to come, so what the router sees now is nearly always what it will choose. Nobody has looked at a
// token's first layers yet.
void Stream::before(size_t layer, const float* x, int64_t tokens) {
    if (sweep_ || !foresee_ || !hints()) return;
    foresee(layer, x, tokens, options_.most, true);
    if (!first_) return;
    hint_previous(layer);
    for (int ahead = 1; ahead < depth(); ++ahead) foresee(layer + size_t(ahead), x, tokens, reach_.far(), false);
}

void Stream::begin(size_t layer, const int64_t* ids, int64_t n) {
    first_ = false;
    layer_ = layer;
    hinted_ahead_ = false;
    if (recording_) routed_.insert(routed_.end(), ids, ids + n);
    ready_.clear();
    backlog_.clear();
    acquire(layer, ids, n);
    if (sweep_)
        guesses_[layer].clear();
    else
        count_foreseen(layer, ids, n);
}

// Decoding rows first: what they ask for is worth keeping, also beside a prompt.
void Stream::acquire(size_t layer, const int64_t* ids, int64_t n) {
    const int64_t k = steps_[layer].layer->routing.k;
    auto& own = previous_[layer];
    if (!decoding_.empty()) own.clear();
    for (const int64_t row : decoding_) own.insert(own.end(), ids + row * k, ids + (row + 1) * k);
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

// Recall of the guesses, whether or not the experts were in memory already.
void Stream::count_foreseen(size_t layer, const int64_t* ids, int64_t n) {
    auto& guesses = guesses_[layer];
    if (guesses.empty()) return;
    for (int64_t i = 0; i < n; ++i) foreseen_ += std::find(guesses.begin(), guesses.end(), ids[i]) != guesses.end();
    asked_ += n;
    guessed_ += int64_t(guesses.size());
    guesses.clear();
}

// Decode: the next layer, and one further away, whose reads get more time; those in between had their turn before. Where memory
// is crowded, few slots are to be had, and the next layer needs them. A prompt: the next layer, once its own experts all have slots (see hint_ahead).
void Stream::meanwhile(size_t layer, const float* x, int64_t tokens) {
    if (!foresee_ || !hints()) return;
    if (sweep_) {
        const Layer* after = layer + 1 < steps_.size() ? steps_[layer + 1].layer : nullptr;
        if (after && after->moe()) look_ahead(layer + 1, x, tokens, after->routing.k);
        return;
    }
    foresee(layer + 1, x, tokens, reach_.width(), true);
    hint_previous(layer + 1);
    if (depth() > 1) foresee(layer + size_t(depth()), x, tokens, reach_.far(), false);
}

void Stream::foresee(size_t layer, const float* x, int64_t tokens, int64_t width, bool soon) {
    if (!options_.lookahead || layer >= steps_.size() || !steps_[layer].layer->moe()) return;
    width = std::min(width, steps_[layer].layer->routing.experts);
    if (look_ahead(layer, x, tokens, width))
        store_->hint(int(layer), guesses_[layer].data(), int64_t(guesses_[layer].size()), false, soon);
}

// What the layer chose for the previous token of each row, the likelier first. Where memory is crowded, what of that is not there
// was too cold to be kept, and the router knows better.
void Stream::hint_previous(size_t layer) {
    if (!options_.previous || (crowded_ && options_.lookahead) || layer >= steps_.size() || !steps_[layer].layer->moe()) return;
    const auto& last = previous_[layer];
    const int64_t k = steps_[layer].layer->routing.k, width = std::min<int64_t>(k, reach_.width());
    ids_.clear();
    for (size_t row = 0; row < last.size(); row += size_t(k))
        ids_.insert(ids_.end(), last.begin() + ptrdiff_t(row), last.begin() + ptrdiff_t(row) + width);
    if (!ids_.empty()) store_->hint(int(layer), ids_.data(), int64_t(ids_.size()), false, true);
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
    auto& guesses = guesses_[layer];
    guesses.resize(size_t(rows * k));
    const bool finite = machine_.route(logits, l.router_bias, rows, shape, guesses.data(), weights);
    if (!finite) guesses.clear();
    return finite;
}

// A prompt's next layer. Its experts get slots that this layer has done with, so this comes when all of its own have one, and
// again when it has ended.
void Stream::hint_ahead() {
    const size_t later = layer_ + 1;
    if (!foresee_ || later >= guesses_.size() || guesses_[later].empty()) return;
    store_->hint(int(later), guesses_[later].data(), int64_t(guesses_[later].size()), true);
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
