// A recorded trace through the store's own bookkeeping, as if every read took no time.
#pragma once

#include <string_view>

#include "residency.h"

namespace moeflux {

class Replay {
public:
    Replay(int n_layers, int n_experts, int n_slots, int floor, std::string_view policy);

    // Experts that one layer is asked for at once, the last `n_swept` by a prompt. Returns those that were not in memory; they are
    // now, as far as slots go round.
    const std::vector<int64_t>& access(int layer, const int64_t* ids, int64_t n, int64_t n_swept);
    // Those of the missing ones that found a slot.
    const std::vector<int64_t>& hint(int layer, const int64_t* ids, int64_t n);
    void next_token() { residency_.next_token(); }
    const Residency& residency() const { return residency_; }

    int64_t useful = 0, wasted = 0, evictions = 0;  // hints asked for later; evicted before; experts evicted

private:
    void check(int layer, const int64_t* ids, int64_t n) const;
    int place(int layer, int expert, Why why);
    void ask(int layer, int expert, Why why);
    void hold(int slot, Why why);

    int n_layers_, n_experts_;
    Residency residency_;
    std::vector<int64_t> out_;
    std::vector<int> pinned_;
};

}  // namespace moeflux
