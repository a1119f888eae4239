// How slots are filled: from the choice of a slot to the last component read, or not.
#include <cerrno>
#include <cstring>

#include "lease_state.h"

namespace moeflux {

namespace {

std::string file_name(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

}  // namespace

uint8_t* Store::component(const Arena& memory, int slot, int layer, int expert, int component) const {
    const Component& of = this->layer(layer).components.at(size_t(component));
    if (!of.kept) return place(memory.slot(slot), layouts_[size_t(layer)].regions[size_t(component)], of.extents[size_t(expert)]);
    const KeptLayout& kept = kept_layouts_[size_t(layer)];
    return memory.kept(layer) + expert * kept.bytes + kept.starts[size_t(component)];
}

bool Store::there(int layer, int expert, int component) const {
    return kept_[size_t(layer)][size_t(expert)] >> component & 1;
}

void Store::keep(const Job& job) {
    if (there(job.layer, job.expert, job.component)) return;  // another slot's read of it came first
    std::memcpy(component(*memory_, job.slot, job.layer, job.expert, job.component), job.to, size_t(job.extent.length));
    auto& bits = kept_[size_t(job.layer)][size_t(job.expert)];
    bits = uint16_t(bits | 1u << job.component);
    bytes_resident_ += job.extent.length;
}

int Store::take_slot(int layer, int expert, Why why, bool desperate) {
    Placement placed = residency_.place(layer, expert, why, desperate);
    const bool hint = why == Why::hint || why == Why::ahead;
    if (placed.slot < 0 && !hint && cancel_a_hint()) placed = residency_.place(layer, expert, why, desperate);
    stats_.evictions += placed.evicted;
    stats_.hints_wasted += placed.wasted;
    if (placed.evicted) bytes_resident_ -= expert_bytes(slot(placed.slot).layer);
    return placed.slot;
}

void Store::fill(int i, int layer, int expert, Priority priority) {
    const ExpertLayer& of = this->layer(layer);
    Slot& s = slot(i);
    s.state = State::filling;
    s.layer = layer;
    s.expert = expert;
    s.left = s.running = 0;
    s.hint_read = priority != Priority::demand;
    s.hint_tick = residency_.tick();
    s.error.reset();
    if (priority == Priority::hint) hinted_.push_back(i);
    if (priority == Priority::soon) hinted_.push_front(i);
    const uint8_t* begins[9];
    for (int c = 0; c < int(of.components.size()); ++c) {
        begins[c] = component(*memory_, i, layer, expert, c);
        if (there(layer, expert, c)) continue;
        queue_.push(job(i, c), priority);
        ++s.left;
    }
    s.todo = s.left;
    s.gate = look_into(of.gate, begins);
    s.up = look_into(of.up, begins);
    s.down = look_into(of.down, begins);
    ++n_filling_;
}

void Store::unqueue(int i) {
    for (int c = 0; c < int(layer(slot(i).layer).components.size()); ++c) queue_.remove(job(i, c));
}

// Only where none of its components is being read.
void Store::cancel(int i) {
    unqueue(i);
    if (hinted_.has(i)) {
        hinted_.remove(i);
        ++stats_.hints_cancelled;
    }
    residency_.evict(i);
    slot(i).state = State::empty;
    --n_filling_;
}

// The latest one, which is for the layer that is furthest away.
bool Store::cancel_a_hint() {
    for (int i = hinted_.last(); i >= 0; i = hinted_.prev(i))
        if (slot(i).running == 0) {
            cancel(i);
            return true;
        }
    return false;
}

// Somebody asks for an expert that is in memory or on its way.
void Store::demanded(int i, Why why) {
    if (residency_.hinted(i)) ++stats_.hints_useful;
    residency_.touch(i, why);
    if (!hinted_.has(i)) return;
    hinted_.remove(i);
    for (int c = 0; c < int(layer(slot(i).layer).components.size()); ++c) queue_.promote(job(i, c));
}

void Store::unpin(int i) {
    if (residency_.unpin(i) > 0 || closed_) return;
    if (slot(i).state == State::failed) {
        residency_.free(i);
        slot(i).state = State::empty;
    } else if (slot(i).state == State::filling && !slot(i).error && untouched(slot(i))) {
        cancel(i);  // nobody waits for it any more
    }
}

// Whether there is a read to begin, and it would not keep the drive busy for too long.
bool Store::may_read() const {
    const int next = queue_.first();
    if (next < 0 || n_running_ == 0 || options_.under_way == 0) return next >= 0;
    const Slot& s = slots_[size_t(next / n_components_)];
    return under_way_ + layer(s.layer).components[size_t(next % n_components_)].bytes <= options_.under_way;
}

std::optional<Job> Store::take(std::chrono::nanoseconds patience) {
    Lock lock = this->lock();
    const auto until = Clock::now() + patience;
    ++n_idle_;
    work_.wait_until(lock, until, [&] { return closed_ || may_read(); });
    --n_idle_;
    const int next = closed_ || !may_read() ? -1 : queue_.pop();
    if (next < 0) return std::nullopt;
    const int i = next / n_components_, c = next % n_components_;
    Slot& s = slot(i);
    const Component& component = layer(s.layer).components[size_t(c)];
    Job job;
    job.slot = i;
    job.component = c;
    job.layer = s.layer;
    job.expert = s.expert;
    job.extent = component.extents[size_t(s.expert)];
    if (component.kept) job.own = std::make_unique_for_overwrite<uint8_t[]>(size_t(component.bytes));
    job.to = component.kept ? job.own.get() : this->component(*memory_, i, s.layer, s.expert, c);
    job.in_place = !component.kept && in_place(layouts_[size_t(s.layer)].regions[size_t(c)], job.extent);
    job.hint = hinted_.has(i);
    job.type = component.type;
    job.file = files_[size_t(job.extent.file)].get();
    job.start = Clock::now();
    job.memory = memory_;
    ++s.running;
    under_way_ += job.extent.length;
    if (n_running_++ == 0) busy_since_ = job.start;
    wake_readers();
    return job;
}

void Store::finish(const Job& job, const ReadResult& result, const std::string& message) {
    const bool read = result.error == 0 && result.done == job.extent.length && message.empty();
    const bool finite = !read || all_finite(job.type, job.to, job.extent.length);
    std::unique_ptr<Error> error = read && finite ? nullptr : describe(job, result, message, finite);
    const Lock lock = this->lock();
    const auto now = Clock::now();
    Slot& s = slot(job.slot);
    --s.running;
    --s.left;
    under_way_ -= job.extent.length;
    if (--n_running_ == 0) stats_.read_busy_ns += std::chrono::nanoseconds(now - busy_since_).count();
    stats_.read_ns += std::chrono::nanoseconds(now - job.start).count();
    stats_.reads += 1;
    stats_.retries += result.retries;
    (s.hint_read ? stats_.bytes_hint : stats_.bytes_demand) += result.done;
    if (result.fell_back) notes_.push_back(job.file->path() + ": direct reads are refused; it is read through the page cache");
    if (closed_) return;
    if (job.own && !error) keep(job);
    if (error && !s.error) {
        s.error = std::move(error);
        doom(job.slot);
    }
    if (s.error ? s.running == 0 : s.left == 0)
        settle(job.slot);
    else if (n_waiting_ && s.running == 0 && hinted_.has(job.slot))
        serve_waiting();  // a demand may take this slot now, half filled as it is
}

// The last read of a slot is over.
void Store::settle(int i) {
    Slot& s = slot(i);
    --n_filling_;
    residency_.filled(i);
    if (s.error) {
        settle_failed(i);
    } else {
        s.state = State::ready;
        bytes_resident_ += expert_bytes(s.layer);
        stats_.hints_completed += s.hint_read;
        if (hinted_.has(i)) hinted_.remove(i);
    }
    if (n_waiting_) serve_waiting();
    if (n_waiters_) ready_.notify_all();
}

// A read of it failed. Whoever asks for the expert from now on gets another slot and a read of its own.
void Store::doom(int i) {
    unqueue(i);
    ++stats_.errors;
    if (residency_.hinted(i)) ++stats_.hints_failed;
    if (hinted_.has(i)) hinted_.remove(i);
    residency_.detach(i);
}

void Store::settle_failed(int i) {
    Slot& s = slot(i);
    s.state = State::failed;
    if (residency_.pins(i) > 0) return;
    residency_.free(i);
    s.state = State::empty;
}

std::unique_ptr<Error> Store::describe(const Job& job, const ReadResult& result, const std::string& message,
                                            bool finite) const {
    const Component& component = layer(job.layer).components[size_t(job.component)];
    const std::string expert =
        ": layer " + std::to_string(job.layer) + ", expert " + std::to_string(job.expert) + "." + component.projection;
    const std::string damaged = "the file is damaged; download it again", &path = job.file->path();
    if (!finite)
        return std::make_unique<Error>(Error::Kind::format, component.part + " holds NaN or infinity",
                                            file_name(path) + expert, damaged);
    const std::string wanted = std::to_string(job.extent.length) + " bytes at " + std::to_string(job.extent.offset);
    if (result.error == 0 && message.empty())
        return std::make_unique<Error>(Error::Kind::read,
                                            "only " + std::to_string(result.done) + " of the " + wanted + " are left",
                                            path + expert, "it was shortened while open; download it again");
    std::string what = (message.empty() ? std::strerror(result.error) : message) + " (reading " + wanted;
    if (result.retries) what += ", tried " + std::to_string(result.retries + 1) + " times";
    return std::make_unique<Error>(Error::Kind::read, what + ")", path + expert,
                                        "the drive failed; check it, or copy the file elsewhere", result.error);
}

}  // namespace moeflux
