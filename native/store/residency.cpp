#include "residency.h"

namespace moeflux {

namespace {
// How far from the old end a choice looks once it has a candidate, and at all for a hint, which can be dropped.
constexpr int kReach = 128;

bool is_hint(Why why) { return why == Why::hint || why == Why::ahead; }
}  // namespace

Residency::Residency(int n_layers, int n_experts, int n_slots, int floor, std::unique_ptr<Policy> policy)
    : n_experts_(n_experts),
      floor_(floor),
      policy_(std::move(policy)),
      entries_(size_t(n_slots)),
      slots_(size_t(n_layers) * size_t(n_experts), -1),
      counts_(size_t(n_layers)),
      order_(n_slots) {
    free_.reserve(size_t(n_slots));
    for (int slot = n_slots - 1; slot >= 0; --slot) free_.push_back(slot);  // the lowest first: memory is touched in order
}

bool Residency::may_take(const Entry& e, int layer, Why why, bool desperate) const {
    if (e.pins > 0 || e.filling) return false;
    if (why == Why::hint && e.tick == tick_) return false;
    if (why == Why::ahead) return e.tick == 0;
    return desperate || e.layer == layer || counts_[size_t(e.layer)] > floor_;
}

int Residency::victim(int layer, Why why, bool desperate) const {
    int slots[kMaxWindow], keys[kMaxWindow];
    const int window = policy_->window();
    int n = 0, visited = 0;
    for (int slot = order_.first(); slot >= 0 && n < window; slot = order_.next(slot)) {
        if (++visited > kReach && (n > 0 || is_hint(why))) break;
        const Entry& e = entry(slot);
        if (!may_take(e, layer, why, desperate)) continue;
        slots[n] = slot;
        keys[n++] = key(e);
        if (why == Why::sweep && e.tick == 0) break;  // what a sweep left behind goes first, whatever the policy
    }
    if (n == 0) return -1;
    if (why == Why::sweep && entry(slots[n - 1]).tick == 0) return slots[n - 1];
    return slots[policy_->choose(keys, n)];
}

Placement Residency::place(int layer, int expert, Why why, bool desperate) {
    Placement placed;
    if (free_.empty()) {
        const int slot = victim(layer, why, desperate);
        if (slot < 0) return placed;
        placed.evicted = true;
        placed.wasted = entry(slot).hinted;
        evict(slot);
    }
    placed.slot = free_.back();
    free_.pop_back();
    Entry& e = entry(placed.slot);
    e = {layer, expert, 0, why == Why::sweep ? 0 : tick_, true, is_hint(why)};
    slots_[size_t(key(e))] = placed.slot;
    ++counts_[size_t(layer)];
    if (why == Why::sweep)
        order_.push_front(placed.slot);
    else
        order_.push_back(placed.slot);
    if (why == Why::demand) policy_->used(key(e));
    return placed;
}

void Residency::touch(int slot, Why why) {
    Entry& e = entry(slot);
    const bool unused = e.hinted;
    e.hinted = false;
    if (why == Why::sweep) {
        if (!unused) return;
        e.tick = 0;  // hinted for this sweep: as if the sweep had loaded it
        order_.remove(slot);
        order_.push_front(slot);
        return;
    }
    e.tick = tick_;
    order_.remove(slot);
    order_.push_back(slot);
    policy_->used(key(e));
}

void Residency::detach(int slot) {
    Entry& e = entry(slot);
    slots_[size_t(key(e))] = -1;
    --counts_[size_t(e.layer)];
    order_.remove(slot);
    e.layer = e.expert = -1;
    e.filling = e.hinted = false;
    e.tick = 0;
}

void Residency::free(int slot) { free_.push_back(slot); }

}  // namespace moeflux
