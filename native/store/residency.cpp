#include "residency.h"

#include <algorithm>

namespace moeflux {

namespace {
// How far from the old end a choice looks once it has a candidate, and at all for a hint, which can be dropped.
constexpr int kReach = 128;

bool is_hint(Why why) { return why == Why::hint || why == Why::ahead; }
}  // namespace

Residency::Residency(int n_layers, int n_experts, int n_slots, int floor, std::unique_ptr<Policy> policy)
    : n_experts_(n_experts),
      floor_(floor),
      share_(n_slots / std::max(1, n_layers)),
      policy_(std::move(policy)),
      entries_(size_t(n_slots)),
      slots_(size_t(n_layers) * size_t(n_experts), -1),
      counts_(size_t(n_layers)),
      kept_(size_t(n_layers)),
      order_(n_slots) {
    free_.reserve(size_t(n_slots));
    for (int slot = n_slots - 1; slot >= 0; --slot) free_.push_back(slot);  // the lowest first: memory is touched in order
}

bool Residency::may_take(const Entry& e, int layer, Why why, bool desperate) const {
    if (e.pins > 0 || e.filling) return false;
    if (why == Why::hint && e.tick == tick_) return false;
    if (why == Why::ahead || (why == Why::hint && crowded_)) return e.tick == 0;
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
        if (passes(why) && e.tick == 0) break;  // what is passing goes first, whatever the policy
    }
    if (n == 0) return -1;
    if (passes(why) && entry(slots[n - 1]).tick == 0) return slots[n - 1];
    const int own = why == Why::demand && crowded_ ? coldest(layer) : -1;
    return own >= 0 ? own : slots[policy_->choose(keys, n)];
}

void Residency::set_tick(Entry& e, int64_t tick) {
    kept_[size_t(e.layer)] += (tick != 0) - (e.tick != 0);
    e.tick = tick;
}

void Residency::pass(int slot) {
    set_tick(entry(slot), 0);
    order_.remove(slot);
    order_.push_front(slot);
}

void Residency::keep(int slot) {
    set_tick(entry(slot), tick_);
    order_.remove(slot);
    order_.push_back(slot);
}

// Of the experts that a layer keeps. `spare_asked`: not one that this token has asked for.
int Residency::coldest(int layer, bool spare_asked) const {
    int found = -1;
    double least = 0;
    for (int expert = 0; expert < n_experts_; ++expert) {
        const int slot = find(layer, expert);
        if (slot < 0) continue;
        const Entry& e = entry(slot);
        if (e.tick == 0 || e.pins > 0 || e.filling || (e.tick == tick_ && (spare_asked || e.hinted))) continue;
        const double warmth = policy_->warmth(key(e));
        if (found < 0 || warmth < least) found = slot, least = warmth;
    }
    return found;
}

// Who gives up a place for a warm expert of this layer: the layer itself, or the one that keeps most where it has not its share.
int Residency::donor(int layer) const {
    if (kept_[size_t(layer)] >= share_) return layer;
    const int richest = int(std::max_element(kept_.begin(), kept_.end()) - kept_.begin());
    return kept_[size_t(richest)] > share_ ? richest : layer;
}

void Residency::keep_if_warm(int slot) {
    const Entry& e = entry(slot);
    const int from = donor(e.layer), cold = coldest(from, from == e.layer);
    if (cold < 0 || (from == e.layer && policy_->warmth(key(e)) < policy_->warmth(key(entry(cold))))) return;
    pass(cold);
    keep(slot);
}

void Residency::next_token() {
    ++tick_;
    if (asked_ > 0) crowded_ = 2 * asked_ > n_slots();
    asked_ = 0;
}

void Residency::settle_hints(int layer) {
    if (!crowded_) return;
    for (int expert = 0; expert < n_experts_; ++expert) {
        const int slot = find(layer, expert);
        if (slot >= 0 && entry(slot).hinted && entry(slot).tick != 0) pass(slot);
    }
}

Placement Residency::place(int layer, int expert, Why why, bool desperate) {
    Placement placed;
    const bool full = free_.empty(), passing = why == Why::sweep || (full && passes(why));
    if (full) {
        const int slot = victim(layer, why, desperate);
        if (slot < 0) return placed;
        placed.evicted = true;
        placed.wasted = entry(slot).hinted;
        evict(slot);
    }
    placed.slot = free_.back();
    free_.pop_back();
    Entry& e = entry(placed.slot);
    e = {layer, expert, 0, 0, true, is_hint(why)};
    slots_[size_t(key(e))] = placed.slot;
    ++counts_[size_t(layer)];
    order_.push_front(placed.slot);
    if (!passing) keep(placed.slot);
    if (why != Why::demand) return placed;
    ++asked_;
    policy_->used(key(e), tick_);
    if (passing) keep_if_warm(placed.slot);
    return placed;
}

void Residency::touch(int slot, Why why) {
    Entry& e = entry(slot);
    const bool unused = e.hinted;
    e.hinted = false;
    if (why == Why::sweep) {
        if (unused) pass(slot);  // hinted for this sweep: as if the sweep had loaded it
        return;
    }
    ++asked_;
    policy_->used(key(e), tick_);
    if (!crowded_ || (e.tick != 0 && !unused)) return keep(slot);
    pass(slot);
    keep_if_warm(slot);
}

void Residency::detach(int slot) {
    Entry& e = entry(slot);
    set_tick(e, 0);
    slots_[size_t(key(e))] = -1;
    --counts_[size_t(e.layer)];
    order_.remove(slot);
    e.layer = e.expert = -1;
    e.filling = e.hinted = false;
}

void Residency::free(int slot) { free_.push_back(slot); }

}  // namespace moeflux
