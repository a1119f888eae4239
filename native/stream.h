// Experts for a forward from a store: hits first, late ones as they arrive, and hints for the layers that follow.
//
// Lives as long as the engine, because what it learns about its predictions outlasts a token.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "cancel.h"
#include "layer.h"
#include "store/store.h"

namespace moeflux {

// How far to look ahead: how many experts of a layer are worth a guess, and of how many layers. Hints cost reads: a wrong one
// is wasted, and where the drive has no idle time even a right one only moves a read. So the reach follows the share of hints
// that were asked for in the end, and more must be right when readers are busy; at zero a small probe now and then finds
// out whether times have changed.
class Reach {
public:
    explicit Reach(int most) : most_(most), width_(most) {}

    int width() const { return width_; }  // of the next layer when this one begins
    int far() const { return std::min(width_, sure()); }  // of one that is further away
    int depth() const { return depth_; }
    // After a token: hints that were issued and that were asked for, the share of the readers' time in which they had nothing
    // to read, and the share of the time that the token waited for experts.
    void learn(int64_t issued, int64_t useful, double idle, double stalled);

private:
    int sure() const { return (most_ + 1) / 2; }  // of a router's guesses, in order, are hardly ever wrong
    static constexpr int kWindow = 8;    // tokens between decisions
    static constexpr int kProbe = 8;     // windows without hints before the next probe
    static constexpr int kDeepest = 4;
    int most_, width_, depth_ = 3;
    int tokens_ = 0, off_ = 0;
    int64_t issued_ = 0, useful_ = 0;  // all summed over the window
    double idle_ = 0, stalled_ = 0;
};

struct StreamOptions {
    bool previous = true;   // hint the experts of the same layer's previous token
    bool lookahead = true;  // hint what the next layer's router says of the current hidden state
    int most = 8;           // hints per layer
};

class Stream : public ExpertSource {
public:
    Stream(std::shared_ptr<Store> store, Machine& machine, StreamOptions options);

    // One forward, which may fail. Holds the machine from its beginning to its end, because the stream itself has room for one:
    // a second caller waits here. What it is given must outlive it.
    class Run {
    public:
        Run(Stream& stream, std::span<const Step> steps, Listener& listener) : call_(stream.machine_), stream_(stream) {
            stream_.listener_ = &listener;
            stream_.start(steps);
        }
        ~Run() { stream_.finish(); }
        Run(const Run&) = delete;
        Run& operator=(const Run&) = delete;

    private:
        const Machine::Call call_;
        Stream& stream_;
    };
    Machine& machine() const { return machine_; }
    const Store& store() const { return *store_; }
    // From now on, keep the ids of the latest forward: those of its first layer with experts, [T, k], then of the next.
    void record(bool on) { recording_ = on; }
    const std::vector<int16_t>& routed() const { return routed_; }

    void listen() override;
    void before(size_t layer, const float* x, int64_t tokens) override;
    void begin(size_t layer, const int64_t* ids, int64_t n) override;
    void meanwhile(size_t layer, const float* x, int64_t tokens) override;
    Experts next() override;
    void end() override;

    const Reach& reach() const { return reach_; }
    // Of the layers for which there was a guess: experts named, experts asked for, and those that were both.
    int64_t guessed() const { return guessed_; }
    int64_t asked() const { return asked_; }
    int64_t foreseen() const { return foreseen_; }

private:
    static constexpr size_t kBatch = 16;         // experts of a prompt that are run before arrivals are looked for
    static constexpr int64_t kRows = 128;        // tokens of a prompt that stand for all where it is foreseen what comes next

    void start(std::span<const Step> steps);
    void finish();
    bool hints() const { return sweep_ ? options_.lookahead : reach_.width() > 0; }
    void foresee(size_t layer, const float* x, int64_t tokens, int64_t width, bool soon);
    void acquire(size_t layer, const int64_t* ids, int64_t n);
    void hint_previous(size_t layer);
    int depth() const { return crowded_ ? 1 : reach_.depth(); }
    bool look_ahead(size_t layer, const float* x, int64_t tokens, int64_t k);
    void hint_ahead();
    void count_foreseen(size_t layer, const int64_t* ids, int64_t n);

    std::shared_ptr<Store> store_;
    Machine& machine_;
    StreamOptions options_;
    Listener* listener_ = nullptr;  // of the forward that runs
    Reach reach_;
    std::span<const Step> steps_;
    size_t layer_ = 0;
    bool foresee_ = false;       // something is not in memory
    bool crowded_ = false;       // a step asks for more than half of what fits: see Residency
    bool first_ = false;         // no layer with experts has begun
    bool hinted_ahead_ = false;  // a prompt's next layer
    Lease lease_;
    bool sweep_ = false;             // some rows are a prompt's: every expert once, in any order
    std::vector<int64_t> decoding_;  // rows that are not
    std::vector<int64_t> ids_;       // of a layer: those of the decoding rows first
    std::vector<Expert> ready_, arrived_, backlog_;
    std::vector<std::vector<int64_t>> previous_, guesses_;  // by layer; previous: [decoding rows, k]
    int64_t guessed_ = 0, asked_ = 0, foreseen_ = 0;
    bool recording_ = false;
    std::vector<int16_t> routed_;
    StoreStats at_start_;
    std::chrono::steady_clock::time_point started_;
};

}  // namespace moeflux
