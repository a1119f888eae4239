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

void Replay::ask(int layer, int expert, Why why) {
    const int slot = residency_.find(layer, expert);
    if (slot < 0) {
        if (std::find(out_.begin(), out_.end(), expert) == out_.end()) out_.push_back(expert);
    } else if (residency_.pins(slot) == 0) {
        useful += residency_.hinted(slot);
        residency_.touch(slot, why);
        hold(slot, why);
    }
}

// Until all that is asked for at once is placed; but what passes is released before the next one is read.
void Replay::hold(int slot, Why why) {
    if (slot < 0 || why == Why::sweep || residency_.passing(slot)) return;
    residency_.pin(slot);
    pinned_.push_back(slot);
}

const std::vector<int64_t>& Replay::access(int layer, const int64_t* ids, int64_t n, int64_t n_swept) {
    check(layer, ids, n);
    const int64_t n_demanded = n - n_swept;
    out_.clear();
    pinned_.clear();
    for (int64_t i = 0; i < n_demanded; ++i) ask(layer, int(ids[i]), Why::demand);
    const size_t missing = out_.size();
    for (int64_t i = n_demanded; i < n; ++i) ask(layer, int(ids[i]), Why::sweep);
    residency_.settle_hints(layer);
    for (size_t i = 0; i < out_.size(); ++i) {
        const Why why = i < missing ? Why::demand : Why::sweep;
        hold(place(layer, int(out_[i]), why), why);
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
