#include "replay.h"

#include <algorithm>
#include <string>

#include "../error.h"

namespace moeflux {

namespace {

int positive(int n, const char* what) {
    if (n < 1) throw Error(Error::Kind::input, std::string(what) + " is " + std::to_string(n) + ", less than 1");
    return n;
}

}  // namespace

Replay::Replay(int n_layers, int n_experts, int n_slots, int floor, std::string_view policy)
    : n_layers_(positive(n_layers, "n_layers")),
      n_experts_(positive(n_experts, "n_experts")),
      residency_(n_layers, n_experts, positive(n_slots, "n_slots"), floor, make_policy(policy, n_layers * n_experts, n_slots)) {}

void Replay::check(int layer, const int64_t* ids, int64_t n) const {
    if (layer < 0 || layer >= n_layers_) throw Error(Error::Kind::input, "there is no layer " + std::to_string(layer) + " of " + std::to_string(n_layers_));
    for (int64_t i = 0; i < n; ++i)
        if (ids[i] < 0 || ids[i] >= n_experts_) throw Error(Error::Kind::input, "there is no expert " + std::to_string(ids[i]) + " of " + std::to_string(n_experts_));
}

int Replay::place(int layer, int expert, Why why) {
    Placement placed = residency_.place(layer, expert, why);
    if (placed.slot < 0 && why == Why::demand) placed = residency_.place(layer, expert, why, true);
    evictions += placed.evicted;
    wasted += placed.wasted;
    if (placed.slot >= 0) residency_.filled(placed.slot);
    return placed.slot;
}

const std::vector<int64_t>& Replay::access(int layer, const int64_t* ids, int64_t n, bool sweep) {
    check(layer, ids, n);
    const Why why = sweep ? Why::sweep : Why::demand;
    out_.clear();
    pinned_.clear();
    for (int64_t i = 0; i < n; ++i) {
        const int slot = residency_.find(layer, int(ids[i]));
        if (slot < 0) {
            if (std::find(out_.begin(), out_.end(), ids[i]) == out_.end()) out_.push_back(ids[i]);
        } else if (residency_.pins(slot) == 0) {
            useful += residency_.hinted(slot);
            residency_.touch(slot, why);
            if (sweep) continue;  // an expert of a sweep is released before the next one is read
            residency_.pin(slot);
            pinned_.push_back(slot);
        }
    }
    for (const int64_t expert : out_) {
        const int slot = place(layer, int(expert), why);
        if (slot < 0 || sweep) continue;
        residency_.pin(slot);
        pinned_.push_back(slot);
    }
    for (const int slot : pinned_) residency_.unpin(slot);
    return out_;
}

const std::vector<int64_t>& Replay::hint(int layer, const int64_t* ids, int64_t n) {
    check(layer, ids, n);
    out_.clear();
    for (int64_t i = 0; i < n; ++i)
        if (residency_.find(layer, int(ids[i])) < 0 && place(layer, int(ids[i]), Why::hint) >= 0) out_.push_back(ids[i]);
    return out_;
}

}  // namespace moeflux
