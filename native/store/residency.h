// Which expert is in which slot, and which one makes room for another. Bookkeeping alone: no bytes, no threads, so that a
// recorded trace can be replayed through the very rules that the store lives by.
//
// A slot is free, or holds one expert (filling, or filled), or is detached (its expert can be asked for anew, but somebody
// still holds the slot). A slot that is pinned or filling is never taken.
//
// Rows of slots are kept from old to young. A demand makes its expert the youngest. A sweep (more experts than fit, each
// used once) puts what it loads at the old end and leaves the others where they are: its next expert replaces its last one,
// and the rest of the memory survives.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "order.h"
#include "policy.h"

namespace moeflux {

// `ahead`: a hint for a sweep, which takes free slots and what sweeps left behind, and nothing else.
enum class Why : int { demand, hint, sweep, ahead };

struct Placement {
    int slot = -1;         // -1: none can be had
    bool evicted = false;  // another expert went for it,
    bool wasted = false;   // which had come by a hint and was never asked for
};

class Residency {
public:
    // `floor`: a layer with that many experts in memory or fewer never loses one to another layer. Without it, an
    // order of layers as regular as a model's makes LRU miss every time as soon as one token's experts do not all fit.
    Residency(int n_layers, int n_experts, int n_slots, int floor, std::unique_ptr<Policy> policy);

    int n_slots() const { return int(entries_.size()); }
    int n_free() const { return int(free_.size()); }
    int find(int layer, int expert) const { return slots_[size_t(layer * n_experts_ + expert)]; }
    int layer(int slot) const { return entry(slot).layer; }
    int expert(int slot) const { return entry(slot).expert; }
    int pins(int slot) const { return entry(slot).pins; }
    bool filling(int slot) const { return entry(slot).filling; }
    bool hinted(int slot) const { return entry(slot).hinted; }
    int count(int layer) const { return counts_[size_t(layer)]; }
    int64_t tick() const { return tick_; }

    // A slot for an expert that has none, now filling. A hint never takes what was demanded or hinted in this token.
    // `desperate`: floors give way, for a demand that could not go on otherwise.
    Placement place(int layer, int expert, Why why, bool desperate = false);
    void filled(int slot) { entry(slot).filling = false; }
    // An expert that has a slot is asked for.
    void touch(int slot, Why why);
    void pin(int slot) { ++entry(slot).pins; }
    int unpin(int slot) { return --entry(slot).pins; }
    void next_token() { ++tick_; }

    void detach(int slot);  // its expert is in no slot any more
    void free(int slot);    // a detached slot can be used again
    void evict(int slot) {
        detach(slot);
        free(slot);
    }

private:
    struct Entry {
        int layer = -1, expert = -1, pins = 0;
        int64_t tick = 0;  // of the token that demanded or hinted it last; 0 for a sweep's
        bool filling = false, hinted = false;
    };
    Entry& entry(int slot) { return entries_[size_t(slot)]; }
    const Entry& entry(int slot) const { return entries_[size_t(slot)]; }
    int key(const Entry& e) const { return e.layer * n_experts_ + e.expert; }
    bool may_take(const Entry& e, int layer, Why why, bool desperate) const;
    int victim(int layer, Why why, bool desperate) const;

    int n_experts_, floor_;
    int64_t tick_ = 1;
    std::unique_ptr<Policy> policy_;
    std::vector<Entry> entries_;
    std::vector<int> slots_, counts_, free_;  // by layer and expert; by layer; a stack
    Order order_;                             // old to young
};

}  // namespace moeflux
