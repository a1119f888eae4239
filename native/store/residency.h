// Which expert is in which slot, and which one makes room for another. Bookkeeping alone: no bytes, no threads, so that a
// recorded trace can be replayed through the very rules that the store lives by.
//
// A slot is free, or holds one expert (filling, or filled), or is detached (its expert can be asked for anew, but somebody
// still holds the slot). A slot that is pinned or filling is never taken.
//
// Rows of slots are kept from old to young. A demand makes its expert the youngest. A sweep (more experts than fit, each
// used once) puts what it loads at the old end and leaves the others where they are: its next expert replaces its last one,
// and the rest of the memory survives. Such an expert is passing; the others are kept.
//
// Layers come round in order, so the oldest experts are those that are wanted next. As long as a token's demands (a token: all
// rows of one step) take a small part of the slots, that does not matter. Where they take more than half of them, memory is crowded,
// and age would throw out what is just about to be asked for. So an expert that a demand loads then passes too, unless it is warmer
// (see Policy) than the coldest that its layer keeps: then it is kept and the coldest passes. Both are next wanted one round
// later, so the comparison is fair, and what is popular comes to stay. Hints for a crowded memory take only what passes.
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
    bool passing(int slot) const { return entry(slot).tick == 0; }
    int count(int layer) const { return counts_[size_t(layer)]; }
    int64_t tick() const { return tick_; }
    // Whether the demands of the last token that had any took more than half of the slots.
    bool crowded() const { return crowded_; }

    // A slot for an expert that has none, now filling. A hint never takes what was demanded or hinted in this token.
    // `desperate`: floors give way, for a demand that could not go on otherwise.
    Placement place(int layer, int expert, Why why, bool desperate = false);
    void filled(int slot) { entry(slot).filling = false; }
    // An expert that has a slot is asked for.
    void touch(int slot, Why why);
    void pin(int slot) { ++entry(slot).pins; }
    int unpin(int slot) { return --entry(slot).pins; }
    void next_token();
    // A layer is asked for its experts: what is hinted for it and not among them was foreseen wrongly. After their touches.
    void settle_hints(int layer);

    void detach(int slot);  // its expert is in no slot any more
    void free(int slot);    // a detached slot can be used again
    void evict(int slot) {
        detach(slot);
        free(slot);
    }

private:
    struct Entry {
        int layer = -1, expert = -1, pins = 0;
        int64_t tick = 0;  // of the token that demanded or hinted it last; 0 where it is passing
        bool filling = false, hinted = false;
    };
    Entry& entry(int slot) { return entries_[size_t(slot)]; }
    const Entry& entry(int slot) const { return entries_[size_t(slot)]; }
    int key(const Entry& e) const { return e.layer * n_experts_ + e.expert; }
    bool may_take(const Entry& e, int layer, Why why, bool desperate) const;
    int victim(int layer, Why why, bool desperate) const;
    bool passes(Why why) const { return why == Why::sweep || (why == Why::demand && crowded_); }
    void set_tick(Entry& e, int64_t tick);
    void pass(int slot);
    void keep(int slot);
    void keep_if_warm(int slot);
    int coldest(int layer, bool spare_asked = true) const;
    int donor(int layer) const;

    int n_experts_, floor_, share_;  // share: of a layer, if all layers keep the same number
    int64_t tick_ = 1, asked_ = 0;   // asked: demands in this token
    bool crowded_ = false;
    std::unique_ptr<Policy> policy_;
    std::vector<Entry> entries_;
    std::vector<int> slots_, counts_, free_;  // by layer and expert; by layer; a stack
    std::vector<int> kept_;                   // by layer: experts that are not passing
    Order order_;                             // old to young
};

}  // namespace moeflux
