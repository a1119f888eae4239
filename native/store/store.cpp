#include "store.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "lease_state.h"
#include "reader.h"

namespace moeflux {

namespace {

int max_experts(const std::vector<ExpertLayer>& layers) {
    int64_t n = 0;
    for (const ExpertLayer& layer : layers) n = std::max(n, layer.n_experts);
    return int(n);
}

int max_components(const std::vector<ExpertLayer>& layers) {
    size_t n = 0;
    for (const ExpertLayer& layer : layers) n = std::max(n, layer.components.size());
    return int(n);
}

int64_t largest_component(const std::vector<ExpertLayer>& layers) {
    int64_t bytes = 1;
    for (const ExpertLayer& layer : layers)
        for (const Component& component : layer.components) bytes = std::max(bytes, component.bytes);
    return bytes;
}

// Of the components that are kept, or of those that are not; 0 for the others.
std::vector<int64_t> sizes(const ExpertLayer& layer, bool kept) {
    std::vector<int64_t> result;
    for (const Component& component : layer.components) result.push_back(component.kept == kept ? component.bytes : 0);
    return result;
}

int64_t sum(const std::vector<int64_t>& values) { return std::accumulate(values.begin(), values.end(), int64_t(0)); }

StoreOptions checked(StoreOptions options) {
    require(options.n_slots >= 1, "a store needs at least one slot");
    require(options.floor >= 0 && options.n_readers >= 0 && options.sweep_slots >= 1 && options.under_way >= 0,
            "floor, n_readers, sweep_slots or under_way is negative");
    require_format(max_experts(options.layers) > 0, "no layer has experts");
    for (size_t i = 0; i < options.layers.size(); ++i) check_layer(options.layers[i], int(i), int(options.paths.size()));
    const int64_t most = std::numeric_limits<int>::max(), keys = int64_t(options.layers.size()) * max_experts(options.layers);
    require_format(keys <= most, std::to_string(keys) + " experts in all; at most " + std::to_string(most) + " are supported");
    const int64_t jobs = int64_t(options.n_slots) * max_components(options.layers);
    if (jobs > most) throw Error(Error::Kind::option, std::to_string(options.n_slots) + " slots are too many", "option 'slots'");
    return options;
}

}  // namespace

std::shared_ptr<Store> Store::open(StoreOptions options) {
    // In a child of fork() its destructor would wait for threads that are not there.
    const auto end = [](Store* store) {
        if (store->here()) delete store;
    };
    std::shared_ptr<Store> store(new Store(checked(std::move(options))), end);
    if (store->options_.n_readers > 0) store->readers_ = std::make_unique<Readers>(*store, store->options_.n_readers);
    return store;
}

Store::Store(StoreOptions options)
    : options_(std::move(options)),
      n_components_(max_components(options_.layers)),
      residency_(int(options_.layers.size()), max_experts(options_.layers), options_.n_slots, options_.floor,
                 make_policy(options_.policy, int(options_.layers.size()) * max_experts(options_.layers), options_.n_slots)),
      queue_(options_.n_slots * n_components_),
      hinted_(options_.n_slots),
      slots_(size_t(options_.n_slots)),
      marks_(size_t(max_experts(options_.layers))) {
    std::vector<int64_t> kept_bytes;
    for (const ExpertLayer& layer : options_.layers) {
        const std::vector<int64_t> in_slot = sizes(layer, false), kept = sizes(layer, true);
        layouts_.emplace_back(in_slot, options_.direct);
        slot_bytes_ = std::max(slot_bytes_, layouts_.back().bytes);
        kept_layouts_.emplace_back(kept);
        kept_bytes.push_back(kept_layouts_.back().bytes * layer.n_experts);
        kept_.emplace_back(size_t(layer.n_experts));
        expert_bytes_.push_back(sum(in_slot));
        n_bytes_ += (sum(in_slot) + sum(kept)) * layer.n_experts;
    }
    for (const std::string& path : options_.paths) {
        files_.push_back(std::make_unique<File>(path, options_.direct));
        if (options_.direct && files_.back()->direct_descriptor() < 0)
            notes_.push_back(path + ": its file system has no direct reads; it is read through the page cache");
    }
    depth_ = std::max(1, options_.n_readers);
    if (options_.under_way) depth_ = int(std::clamp<int64_t>(options_.under_way / largest_component(options_.layers), 1, depth_));
    memory_ = std::make_shared<const Arena>(options_.n_slots, slot_bytes_, kept_bytes);
    wanted_.reserve(marks_.size());
}

Store::~Store() { close(); }

void Store::check(int layer, const int64_t* ids, int64_t n) const {
    const auto experts = layer >= 0 && layer < n_layers() ? this->layer(layer).n_experts : 0;
    const auto refuse = [&](const std::string& what) { throw Error(Error::Kind::input, what, "layer " + std::to_string(layer)); };
    if (experts == 0) refuse("has no experts");
    for (int64_t i = 0; i < n; ++i)
        if (ids[i] < 0 || ids[i] >= experts) refuse("there is no expert " + std::to_string(ids[i]) + " of " + std::to_string(experts));
}

const std::vector<int>& Store::distinct(int layer, const int64_t* ids, int64_t n) {
    ++mark_;
    for (int64_t i = 0; i < n; ++i) marks_[size_t(ids[i])] = mark_;
    wanted_.clear();
    for (int expert = 0; expert < int(this->layer(layer).n_experts); ++expert)
        if (marks_[size_t(expert)] == mark_) wanted_.push_back(expert);
    return wanted_;
}

void Store::hint(int layer, const int64_t* ids, int64_t n, bool sweep, bool soon) {
    check(layer, ids, n);
    const Lock lock = this->lock();
    if (closed_) throw closed_error();
    for (const int expert : distinct(layer, ids, n)) {
        if (residency_.find(layer, expert) >= 0) continue;
        const int slot = starving() ? -1 : take_slot(layer, expert, sweep ? Why::ahead : Why::hint, false);
        if (slot < 0) {
            ++stats_.hints_dropped;
            continue;
        }
        ++stats_.hints_issued;
        fill(slot, layer, expert, soon ? Priority::soon : Priority::hint);
    }
    wake_readers();
}

bool Store::next_token() {
    const Lock lock = this->lock();
    residency_.next_token();
    for (int i = hinted_.first(), next; i >= 0; i = next) {
        next = hinted_.next(i);
        if (slot(i).hint_tick < residency_.tick() - 1 && untouched(slot(i))) cancel(i);
    }
    return residency_.crowded();
}

void Store::close() {
    if (!here()) return;
    {
        const Lock lock = this->lock();
        if (closed_) return;
        closed_ = true;
        stopping_.store(true);
        queue_.clear();
        ready_.notify_all();
        work_.notify_all();
    }
    readers_.reset();
    const Lock lock = this->lock();
    memory_.reset();
}

StoreStats Store::stats() const {
    const Lock lock = this->lock();
    StoreStats s = stats_;
    if (n_running_) s.read_busy_ns += std::chrono::nanoseconds(Clock::now() - busy_since_).count();
    s.slots = options_.n_slots;
    s.slots_used = closed_ ? 0 : options_.n_slots - residency_.n_free();
    s.bytes_resident = closed_ ? 0 : bytes_resident_;
    s.hints_unused = s.hints_issued - s.hints_useful - s.hints_wasted - s.hints_cancelled - s.hints_failed;
    return s;
}

std::vector<uint8_t> Store::resident() const {
    int64_t n_experts = 0;
    for (const ExpertLayer& layer : options_.layers) n_experts = std::max(n_experts, layer.n_experts);
    std::vector<uint8_t> found(options_.layers.size() * size_t(n_experts));
    const Lock lock = this->lock();
    for (const Slot& s : slots_)
        if (s.state == State::ready) found[size_t(s.layer * n_experts + s.expert)] = 1;
    return found;
}

std::vector<std::string> Store::take_notes() {
    const Lock lock = this->lock();
    return std::exchange(notes_, {});
}

std::vector<Store::SlotView> Store::slots() const {
    static constexpr const char* names[] = {"empty", "filling", "ready", "failed"};
    const Lock lock = this->lock();
    std::vector<SlotView> views;
    for (int i = 0; i < options_.n_slots; ++i) {
        const Slot& s = slots_[size_t(i)];
        const int pins = residency_.pins(i);
        const bool leased = s.state == State::ready && pins, failing = s.state == State::filling && s.error;
        views.push_back({s.layer, s.expert, pins, leased ? "leased" : failing ? "failing" : names[int(s.state)]});
    }
    return views;
}

Store::Lock Store::lock() const {
    process_.check("the expert store");
    return Lock(mutex_);
}

Error Store::closed_error() const { return {Error::Kind::closed, "the expert store is closed"}; }

}  // namespace moeflux
