// A lease's own side: everything it does, the store does for it.
#include <algorithm>

#include "lease_state.h"

namespace moeflux {

using Step = LeaseState::Step;

namespace {

Error released() { return {Error::Kind::state, "the lease was released"}; }

}  // namespace

LeaseState::Want* LeaseState::find(int64_t expert) {
    const auto at = std::lower_bound(wants.begin(), wants.end(), expert, [](const Want& w, int64_t e) { return w.expert < e; });
    return at != wants.end() && at->expert == expert ? &*at : nullptr;
}

Lease::Lease(std::shared_ptr<Store> store, std::unique_ptr<LeaseState> state) : store_(std::move(store)), state_(std::move(state)) {}

Lease::Lease() = default;

Lease::Lease(Lease&&) noexcept = default;

Lease& Lease::operator=(Lease&& other) noexcept {
    if (this != &other) {
        release();
        store_ = std::move(other.store_);
        state_ = std::move(other.state_);
    }
    return *this;
}

Lease::~Lease() { release(); }

size_t Lease::next(std::vector<Expert>& out, bool wait, Listener* listener) {
    if (!state_) throw released();
    return store_->next(*state_, out, wait, listener);
}

void Lease::release(const std::vector<Expert>& experts) {
    if (!state_) return;
    const auto lock = store_->lock();
    state_->owner = std::this_thread::get_id();
    for (const Expert& expert : experts) store_->release(*state_, expert.id);
    store_->slots_given_back();
}

void Lease::release() {
    if (state_ && store_->here()) store_->end(std::move(state_));
    (void)state_.release();  // in a child of fork() it stays where it is: the store that knows it does too
    store_.reset();
}

std::shared_ptr<const Arena> Lease::memory() const { return state_ ? state_->memory : nullptr; }

size_t Lease::left() const { return state_ ? state_->open.size() : 0; }

size_t Lease::waiting() const {
    if (!state_) return 0;
    const auto lock = store_->lock();
    return size_t(state_->n_waiting);
}

const uint8_t* Lease::bytes(int64_t expert, int component) const {
    if (!state_) throw released();
    const auto lock = store_->lock();
    LeaseState::Want* want = state_->find(expert);
    if (!want || want->step != Step::handed) throw not_held(expert);
    return store_->component(*state_->memory, want->slot, state_->layer, int(expert), component);
}

}  // namespace moeflux
