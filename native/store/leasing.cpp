// What leases ask of the store: slots, in turn, and waiting for them.
#include <algorithm>

#include "lease_state.h"

namespace moeflux {

using Step = LeaseState::Step;

Lease Store::acquire(int layer, const int64_t* ids, int64_t n, int64_t n_swept) {
    check(layer, ids, n);
    const Lock lock = this->lock();
    if (closed_) throw closed_error();
    std::unique_ptr<LeaseState> state = spare_.empty() ? std::make_unique<LeaseState>() : std::move(spare_.back());
    if (!spare_.empty()) spare_.pop_back();
    LeaseState& l = *state;
    l.layer = layer;
    l.owner = std::this_thread::get_id();
    l.memory = memory_;
    for (const int expert : distinct(layer, ids, n)) {
        l.open.push_back(int(l.wants.size()));
        l.wants.push_back({expert, -1, n_swept > 0});
    }
    if (n_swept > 0)
        for (int64_t i = 0; i < n - n_swept; ++i) l.find(ids[i])->swept = false;
    live_.push_back(&l);
    ++stats_.acquires;
    stats_.asked += int64_t(l.wants.size());
    // First what is there, so that none of it makes room for what is missing.
    for (size_t i = 0; i < l.wants.size(); ++i) {
        const int there = residency_.find(layer, l.wants[i].expert);
        if (there < 0) {
            l.turns.push_back(int(i));
            ++l.n_waiting;
            ++stats_.misses;
            continue;
        }
        (slot(there).state == State::ready ? stats_.hits : hinted_.has(there) ? stats_.late : stats_.joined) += 1;
        join(l, i, there);
    }
    // What was foreseen for this layer and is not among them will not be needed now.
    for (int i = hinted_.first(), next; i >= 0; i = next) {
        next = hinted_.next(i);
        if (slot(i).layer == layer && untouched(slot(i))) cancel(i);
    }
    residency_.settle_hints(layer);
    if (n_swept > 0) std::stable_partition(l.turns.begin(), l.turns.end(), [&](int i) { return !l.wants[size_t(i)].swept; });
    n_waiting_ += l.n_waiting;
    while (l.n_waiting && place_next(l, false)) {
    }
    wake_readers();
    return {shared_from_this(), std::move(state)};
}

void Store::join(LeaseState& l, size_t want, int i) {
    l.wants[want].loaded = passing(l.wants[want].swept) && residency_.hinted(i);  // a hint ahead of it: counts as its own
    l.n_loaded += l.wants[want].loaded;
    demanded(i, l.wants[want].swept ? Why::sweep : Why::demand);
    residency_.pin(i);
    l.wants[want].slot = i;
    l.wants[want].step = Step::placed;
    ++l.n_placed;
    ++l.n_held;
}

// A slot for the next expert that has none. False: none can be had now.
bool Store::place_next(LeaseState& l, bool desperate) {
    const auto at = size_t(l.turns[l.cursor]);
    LeaseState::Want& want = l.wants[at];
    const int there = residency_.find(l.layer, want.expert);
    if (there >= 0) {  // came meanwhile
        join(l, at, there);
    } else {
        if (passing(want.swept) && !desperate && residency_.n_free() == 0 && l.n_loaded >= options_.sweep_slots) return false;
        const int i = take_slot(l.layer, want.expert, want.swept ? Why::sweep : Why::demand, desperate);
        if (i < 0) return false;
        fill(i, l.layer, want.expert, Priority::demand);
        residency_.pin(i);
        want.slot = i;
        want.step = Step::placed;
        want.loaded = true;
        ++l.n_placed;
        ++l.n_held;
        ++l.n_loaded;
    }
    ++l.cursor;
    --l.n_waiting;
    --n_waiting_;
    return true;
}

void Store::serve_waiting() {
    for (LeaseState* l : live_)
        while (l->n_waiting && place_next(*l, false)) {
        }
    wake_readers();
}

// Whether a lease waits for slots that cannot be had. One whose experts pass always does: it takes only so many at a time.
bool Store::starving() const {
    return std::any_of(live_.begin(), live_.end(), [this](const LeaseState* l) {
        return l->n_waiting && !passing(l->wants[size_t(l->turns[l->cursor])].swept);
    });
}

// Hands out what is ready; stops at what has failed.
void Store::collect(LeaseState& l, std::vector<Expert>& out) {
    size_t kept = 0;
    for (size_t at = 0; at < l.open.size(); ++at) {
        LeaseState::Want& want = l.wants[size_t(l.open[at])];
        const State state = want.slot < 0 ? State::empty : slot(want.slot).state;
        if (state == State::ready) {
            const Slot& s = slot(want.slot);
            out.push_back({want.expert, &s.gate, &s.up, &s.down});
            want.step = Step::handed;
            --l.n_placed;
        } else {
            if (state == State::failed && !l.error) l.error = std::make_unique<Error>(*slot(want.slot).error);
            l.open[kept++] = l.open[at];
        }
    }
    l.open.resize(kept);
}

size_t Store::next(LeaseState& l, std::vector<Expert>& out, bool wait, Listener* listener) {
    out.clear();
    Lock lock = this->lock();
    l.owner = std::this_thread::get_id();
    for (;;) {
        if (closed_) throw closed_error();
        if (!l.error) collect(l, out);
        if (l.error) throw Error(*l.error);
        if (!out.empty() || l.open.empty() || !wait) return out.size();
        if (l.n_placed == 0) {  // all that is left waits for slots
            if (place_next(l, true)) {
                wake_readers();
                continue;
            }
            if (hopeless(l)) throw full_error(l);
        }
        wait_for_experts(lock, l, listener);
    }
}

// Until something has changed, or for as long as one may go without listening.
void Store::wait_for_experts(Lock& lock, LeaseState& l, Listener* listener) {
    const auto start = Clock::now();
    bool changed = true;
    l.blocked = true;
    ++n_waiters_;
    if (listener) changed = ready_.wait_until(lock, start + Listener::kEvery) == std::cv_status::no_timeout;
    else ready_.wait(lock);
    --n_waiters_;
    l.blocked = false;
    stats_.stall_ns += std::chrono::nanoseconds(Clock::now() - start).count();
    if (changed) return;
    lock.unlock();
    listener->listen();
    lock.lock();
}

// Whether nobody is left who could give a slot: no read is under way whose slot might be had, and every slot is held by
// this thread or by one that waits for a slot itself.
bool Store::hopeless(const LeaseState& l) const {
    if (n_filling_ > 0) return false;
    const auto starves = [&](std::thread::id thread) {
        return thread == l.owner || std::any_of(live_.begin(), live_.end(), [&](const LeaseState* other) {
            return other->owner == thread && other->blocked && other->n_placed == 0;
        });
    };
    return std::all_of(live_.begin(), live_.end(),
                       [&](const LeaseState* other) { return other->n_held == 0 || starves(other->owner); });
}

Error Store::full_error(const LeaseState& l) const {
    const std::string slots = std::to_string(options_.n_slots);
    return {Error::Kind::full,
            "the slot pool is full: all " + slots + " slots are leased (" + std::to_string(l.n_held) + " by this lease of " +
                std::to_string(l.wants.size()) + " experts), and " + std::to_string(l.n_waiting) + " more are wanted",
            "layer " + std::to_string(l.layer), "give the experts a larger budget, or release some before asking for more"};
}

void Store::release(LeaseState& l, int64_t expert) {
    LeaseState::Want* want = l.find(expert);
    if (!want || want->step != Step::handed) throw not_held(expert);
    unpin(want->slot);
    want->step = Step::released;
    --l.n_held;
    l.n_loaded -= want->loaded;
}

void Store::slots_given_back() {
    if (closed_ || !n_waiting_) return;
    serve_waiting();
    ready_.notify_all();
}

void Store::end(std::unique_ptr<LeaseState> l) {
    const Lock lock = this->lock();
    for (const LeaseState::Want& want : l->wants)
        if (want.step == Step::placed || want.step == Step::handed) unpin(want.slot);
    n_waiting_ -= l->n_waiting;
    live_.erase(std::find(live_.begin(), live_.end(), l.get()));
    slots_given_back();
    l->wants.clear();
    l->open.clear();
    l->turns.clear();
    l->cursor = 0;
    l->n_waiting = l->n_placed = l->n_held = l->n_loaded = 0;
    l->error.reset();
    l->memory.reset();
    spare_.push_back(std::move(l));
}

}  // namespace moeflux
