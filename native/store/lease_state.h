// What a lease holds, guarded by the store's mutex.
#pragma once

#include "store.h"

namespace moeflux {

struct LeaseState {
    enum class Step : int { waiting, placed, handed, released };
    struct Want {
        int expert = 0, slot = -1;
        bool swept = false;  // only a prompt asks for it
        Step step = Step::waiting;
        bool loaded = false;  // read for this lease, or ahead of it
    };

    int layer = 0;
    std::vector<Want> wants;  // ascending by expert
    std::vector<int> open;    // wants that were not handed out
    std::vector<int> turns;   // wants that had no slot: demands first, then what is swept
    size_t cursor = 0;        // wants in turn before it have a slot
    int n_waiting = 0;        // wants without a slot
    int n_placed = 0;         // wants with a slot, not handed out
    int n_held = 0;           // pinned slots
    int n_loaded = 0;         // of these, read for this lease
    bool blocked = false;     // its owner waits in next()
    std::thread::id owner;    // who used it last
    std::unique_ptr<Error> error;
    std::shared_ptr<const Arena> memory;

    Want* find(int64_t expert);
};

inline Error not_held(int64_t expert) {
    return {Error::Kind::state, "an expert that this lease does not hold: " + std::to_string(expert)};
}

}  // namespace moeflux
