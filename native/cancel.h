// Ending a run from outside: a flag that any thread may set, and what a run listens to between layers, between parts of a layer
// and while it waits for experts.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>

#include "error.h"

namespace moeflux {

class CancelFlag {
public:
    void set() { set_.store(true, std::memory_order_relaxed); }
    void clear() { set_.store(false, std::memory_order_relaxed); }
    bool is_set() const { return set_.load(std::memory_order_relaxed); }

private:
    std::atomic<bool> set_{false};
};

// One run's ears; used by its thread alone. Signals are looked for by the clock, because that needs Python's lock.
class Listener {
public:
    static constexpr auto kEvery = std::chrono::milliseconds(10);

    explicit Listener(const CancelFlag* cancel = nullptr, std::function<void()> signals = {})
        : cancel_(cancel), signals_(std::move(signals)), due_(Clock::now() + kEvery) {}

    // Throws where the run should end. Whoever calls it holds no lock that a signal's handler might want.
    void listen() {
        if (cancel_ && cancel_->is_set()) throw Error(Error::Kind::cancelled, "the run was cancelled");
        if (!signals_ || Clock::now() < due_) return;
        signals_();
        due_ = Clock::now() + kEvery;
    }

private:
    using Clock = std::chrono::steady_clock;
    const CancelFlag* cancel_;
    std::function<void()> signals_;
    Clock::time_point due_;
};

}  // namespace moeflux
