// Experts for a forward from a store: hits first, late ones as they arrive. Asks the routers that the predictor wants to hear,
// and passes its hints on.
#pragma once

#include <memory>
#include <vector>

#include "cancel.h"
#include "layer.h"
#include "predict/predictor.h"
#include "store/store.h"

namespace moeflux {

class Stream : public ExpertSource {
public:
    Stream(std::shared_ptr<Store> store, Machine& machine, PredictOptions options);

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

    const Predictor& predictor() const { return predictor_; }

private:
    static constexpr size_t kBatch = 16;         // experts of a prompt that are run before arrivals are looked for
    static constexpr int64_t kRows = 128;        // tokens of a prompt that stand for all where it is foreseen what comes next

    void start(std::span<const Step> steps);
    void finish();
    void look(const Look& look, const float* x, int64_t tokens);
    void acquire(size_t layer, const int64_t* ids, int64_t n);
    bool look_ahead(size_t layer, const float* x, int64_t tokens, int64_t k);
    void hint(size_t layer, std::span<const int64_t> ids, bool sweep, bool soon);
    void hint_ahead();

    std::shared_ptr<Store> store_;
    Machine& machine_;
    Listener* listener_ = nullptr;  // of the forward that runs
    Predictor predictor_;
    std::span<const Step> steps_;
    size_t layer_ = 0;
    bool hinted_ahead_ = false;  // a prompt's next layer
    Lease lease_;
    bool sweep_ = false;             // some rows are a prompt's: every expert once, in any order
    std::vector<int64_t> decoding_;  // rows that are not
    std::vector<int64_t> ids_;       // of a layer: those of the decoding rows first
    std::vector<Expert> ready_, arrived_, backlog_;
    bool recording_ = false;
    std::vector<int16_t> routed_;
    StoreStats at_start_;
    std::chrono::steady_clock::time_point started_;
};

}  // namespace moeflux
