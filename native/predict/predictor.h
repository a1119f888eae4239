// What later layers will likely ask for: what they chose for the previous token, and what their routers say of the hidden
// states of now. Knows no arithmetic and no files: whoever drives the layers is told where to look, asks the router there,
// and passes hints on to the store. Lives as long as the engine, because what it learns outlasts a token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "reach.h"

namespace moeflux {

struct PredictOptions {
    bool previous = true;   // hint the experts of the same layer's previous token
    bool lookahead = true;  // hint what the next layer's router says of the current hidden state
    int most = 8;           // hints per layer
};

struct Look {
    enum At {
        kRouter,    // ask the layer's router for `width` experts a row, and hint them
        kPrevious,  // hint `previous(layer)`
        kPrompt,    // ask the router for as many as it chooses; hint them when this layer has slots for its own (`ahead`)
    } at;
    size_t layer;  // may be none with experts: then there is nothing to look at
    int64_t width = 0;
    bool soon = false;  // before other hints
};

class Predictor {
public:
    Predictor(size_t n_layers, PredictOptions options);

    size_t n_layers() const { return guesses_.size(); }

    // A step begins. `sweep`: some rows are a prompt's. `missing`: something is not in memory. `crowded`: a step asks for more
    // than half of what fits, so few slots are to be had.
    void start(bool sweep, bool missing, bool crowded);
    // It has ended: see Reach. Prompts have no part in what decoding learns.
    void finish(int64_t issued, int64_t useful, double idle, double stalled);

    // Where to look before the mixer of a layer, and while its experts arrive. Good until the next is asked for.
    std::span<const Look> before(size_t layer);
    std::span<const Look> meanwhile(size_t layer);
    // For a router's answer, [rows, width]; empty where there is none.
    std::vector<int64_t>& guesses(size_t layer) { return guesses_[layer]; }
    // What the layer chose for the previous token of each row, the likelier first.
    std::span<const int64_t> previous(size_t layer, int64_t k);
    // A prompt's next layer.
    std::span<const int64_t> ahead(size_t layer) const;

    // What a layer chose: ids [T, k]. Gives back those of the rows that decode, which are remembered.
    const std::vector<int64_t>& chose(size_t layer, const int64_t* ids, int64_t n, std::span<const int64_t> decoding, int64_t k);

    const Reach& reach() const { return reach_; }
    // Of the layers for which there was a guess: experts named, experts asked for, and those that were both.
    int64_t guessed() const { return guessed_; }
    int64_t asked() const { return asked_; }
    int64_t foreseen() const { return foreseen_; }

private:
    bool hints() const { return missing_ && (sweep_ ? options_.lookahead : reach_.width() > 0); }
    int depth() const { return crowded_ ? 1 : reach_.depth(); }
    void ask(size_t layer, int64_t width, bool soon);
    void recall(size_t layer);
    void count(size_t layer, const int64_t* ids, int64_t n);

    PredictOptions options_;
    Reach reach_;
    bool sweep_ = false, missing_ = false, crowded_ = false;
    bool first_ = false;  // no layer with experts has begun
    std::vector<Look> looks_;
    std::vector<int64_t> ids_;
    std::vector<std::vector<int64_t>> previous_, guesses_;  // by layer; previous: [decoding rows, k]
    int64_t guessed_ = 0, asked_ = 0, foreseen_ = 0;
};

}  // namespace moeflux
