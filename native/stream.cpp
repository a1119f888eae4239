#include "stream.h"

#include <algorithm>

namespace moeflux {

void Reach::learn(int64_t issued, int64_t useful, double idle) {
    idle_ += idle;
    if (++tokens_ < kWindow) return;
    const int64_t n = issued - issued_;
    const double share = n > 0 ? double(useful - useful_) / double(n) : 0, spare = idle_ / kWindow;
    const double needed = spare > 0.2 ? 0.35 : 0.6;
    tokens_ = 0;
    idle_ = 0;
    issued_ = issued;
    useful_ = useful;
    if (width_ == 0) {
        if (++off_ < kProbe) return;
        off_ = 0;
        width_ = std::min(most_, 2);
    } else if (n > 0 && share < needed) {
        if (depth_ > 1) --depth_;
        else width_ /= 2;
    } else if (n > 0 && share > needed + 0.2) {
        if (width_ < most_) ++width_;
        else if (spare > 0.1 && depth_ < kDeepest) ++depth_;
    }
}

Stream::Stream(std::shared_ptr<Store> store, Machine& machine, StreamOptions options)
    : store_(std::move(store)), machine_(machine), options_(options), reach_(options.previous || options.lookahead ? options.most : 0),
      previous_(size_t(store_->n_layers())), guesses_(size_t(store_->n_layers())) {}

void Stream::start(std::span<const Step> steps) {
    steps_ = steps;
    routed_.clear();
    started_ = std::chrono::steady_clock::now();
    busy_ns_ = store_->stats().read_busy_ns;
    store_->next_token();
}

void Stream::finish() {
    lease_ = Lease();
    const auto stats = store_->stats();
    const double ns = double((std::chrono::steady_clock::now() - started_).count());
    const double idle = 1.0 - std::min(1.0, double(stats.read_busy_ns - busy_ns_) / std::max(1.0, ns));
    reach_.learn(stats.hints_issued, stats.hints_useful, idle);
}

void Stream::begin(size_t layer, const int64_t* ids, int64_t n, int64_t tokens) {
    sweep_ = tokens > kDecodeTokens;
    if (recording_) routed_.insert(routed_.end(), ids, ids + n);
    if (sweep_ && options_.interrupt) options_.interrupt();
    ready_.clear();
    backlog_.clear();
    lease_ = store_->acquire(int(layer), ids, n, sweep_);
    if (sweep_) return;
    count_foreseen(layer, ids, n);
    previous_[layer].assign(ids, ids + n);
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

void Stream::meanwhile(size_t layer, const float* x, int64_t) {
    if (sweep_ || reach_.width() == 0) return;
    for (size_t later = layer + 1; later <= layer + size_t(reach_.depth()) && later < steps_.size(); ++later) {
        if (!steps_[later].layer->moe()) continue;
        if (options_.lookahead) look_ahead(later, x);
        const auto& last = previous_[later];
        if (options_.previous) store_->hint(int(later), last.data(), std::min<int64_t>(int64_t(last.size()), reach_.width()));
    }
}

// The router of a later layer applied to the hidden state of now, which the layers in between change little.
void Stream::look_ahead(size_t layer, const float* x) {
    const Layer& l = *steps_[layer].layer;
    const int64_t k = std::min<int64_t>(reach_.width(), l.routing.experts);
    float *h = machine_.floats(11, l.hidden), *logits = machine_.floats(12, l.router.rows), *weights = machine_.floats(13, k);
    auto& guesses = guesses_[layer];
    guesses.resize(size_t(k));
    machine_.rms_norm(x, l.ffn_norm, l.eps, 1, l.hidden, h);
    machine_.linears(h, 1, {&l.router}, {logits});
    RouterShape shape = l.routing;
    shape.k = k;
    if (!machine_.route(logits, l.router_bias, 1, shape, guesses.data(), weights)) {
        guesses.clear();
        return;
    }
    store_->hint(int(layer), guesses.data(), k);
}

Experts Stream::next() {
    lease_.release(ready_);  // what this layer still waits for may need the slots
    ready_.clear();
    if (!sweep_) {
        lease_.next(ready_);
        return ready_;
    }
    // Arrivals first, because their slots are wanted for what comes next.
    lease_.next(arrived_, backlog_.empty());
    for (const Expert& expert : arrived_) backlog_.push_back(expert);
    const size_t n = std::min(backlog_.size(), kBatch);
    ready_.assign(backlog_.end() - ptrdiff_t(n), backlog_.end());
    backlog_.resize(backlog_.size() - n);
    return ready_;
}

void Stream::end() { lease_ = Lease(); }

}  // namespace moeflux
