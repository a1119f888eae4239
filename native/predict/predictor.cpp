#include "predictor.h"

#include <algorithm>

namespace moeflux {

Predictor::Predictor(size_t n_layers, PredictOptions options)
    : options_(options), reach_(options.previous || options.lookahead ? options.most : 0), previous_(n_layers), guesses_(n_layers) {}

void Predictor::start(bool sweep, bool missing, bool crowded) {
    sweep_ = sweep;
    missing_ = missing;
    crowded_ = crowded;
    first_ = true;
}

void Predictor::finish(int64_t issued, int64_t useful, double idle, double stalled) {
    if (!sweep_) reach_.learn(issued, useful, idle, stalled);
}

// Only the mixer is still to come, so what the router sees now is nearly always what it will choose. Nobody has looked at a
// token's first layers yet.
std::span<const Look> Predictor::before(size_t layer) {
    looks_.clear();
    if (sweep_ || !hints()) return {};
    ask(layer, options_.most, true);
    if (!first_) return looks_;
    recall(layer);
    for (int ahead = 1; ahead < depth(); ++ahead) ask(layer + size_t(ahead), reach_.far(), false);
    return looks_;
}

// Decode: the next layer, and one further away, whose reads get more time; those in between had their turn before. Where memory
// is crowded, few slots are to be had, and the next layer needs them. A prompt: the next layer, once its own experts all have
// slots (see `ahead`).
std::span<const Look> Predictor::meanwhile(size_t layer) {
    looks_.clear();
    if (!hints()) return {};
    if (sweep_) {
        looks_.push_back({Look::kPrompt, layer + 1});
        return looks_;
    }
    ask(layer + 1, reach_.width(), true);
    recall(layer + 1);
    if (depth() > 1) ask(layer + size_t(depth()), reach_.far(), false);
    return looks_;
}

void Predictor::ask(size_t layer, int64_t width, bool soon) {
    if (options_.lookahead) looks_.push_back({Look::kRouter, layer, width, soon});
}

// Where memory is crowded, what of the previous token's is not there was too cold to be kept, and the router knows better.
void Predictor::recall(size_t layer) {
    if (options_.previous && !(crowded_ && options_.lookahead)) looks_.push_back({Look::kPrevious, layer, 0, true});
}

std::span<const int64_t> Predictor::previous(size_t layer, int64_t k) {
    const auto& last = previous_[layer];
    const int64_t width = std::min<int64_t>(k, reach_.width());
    ids_.clear();
    for (size_t row = 0; row < last.size(); row += size_t(k))
        ids_.insert(ids_.end(), last.begin() + ptrdiff_t(row), last.begin() + ptrdiff_t(row) + width);
    return ids_;
}

std::span<const int64_t> Predictor::ahead(size_t layer) const {
    if (!missing_ || layer >= guesses_.size()) return {};
    return guesses_[layer];
}

const std::vector<int64_t>& Predictor::chose(size_t layer, const int64_t* ids, int64_t n, std::span<const int64_t> decoding,
                                             int64_t k) {
    first_ = false;
    auto& own = previous_[layer];
    if (!decoding.empty()) own.clear();
    for (const int64_t row : decoding) own.insert(own.end(), ids + row * k, ids + (row + 1) * k);
    if (sweep_) guesses_[layer].clear();
    else count(layer, ids, n);
    return own;
}

// Recall of the guesses, whether or not the experts were in memory already.
void Predictor::count(size_t layer, const int64_t* ids, int64_t n) {
    auto& guesses = guesses_[layer];
    if (guesses.empty()) return;
    for (int64_t i = 0; i < n; ++i) foreseen_ += std::find(guesses.begin(), guesses.end(), ids[i]) != guesses.end();
    asked_ += n;
    guessed_ += int64_t(guesses.size());
    guesses.clear();
}

}  // namespace moeflux
