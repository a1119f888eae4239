// The routed experts of a model behind a fixed number of slots in memory.
//
// A slot is empty, filling, ready, leased (ready and pinned) or failed. The ordering that keeps leased bytes from changing:
//   1. Bytes of a slot change only while it is filling.
//   2. Filling starts only from a slot that nobody has pinned; who is chosen, and that he is pinned by nobody, is decided
//      under the mutex.
//   3. A slot becomes ready under the mutex, after its last reader has written its last byte and come back for the mutex.
//      Whoever sees it ready, under the mutex, sees the bytes.
//   4. A lease pins under the same mutex, and its owner unpins it only when it will not look again.
// What is kept of an expert outside its slot (its scales, where there is memory for those of all experts) is read once: a reader
// fills memory of its own, which is copied under the mutex if nobody else's was before. From then on it never changes, and
// filling a slot with this expert reads the rest only.
// A read that fails never becomes ready: the slot stays with the leases that wait for it until they have seen the error, and
// then is empty; the expert can meanwhile be asked for anew and gets another slot.
//
// Readers never hold the mutex while they read, and whoever waits for a read holds nothing but its lease. Nothing here
// decides what is computed: a hint, a policy or a size changes when bytes come, never which.
//
// Stores share nothing. In a child of fork() a store refuses every use, and is never waited for or destroyed: its readers are
// not there, and its mutex may be locked by one of them.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../cancel.h"
#include "../error.h"
#include "../machine.h"
#include "../process.h"
#include "arena.h"
#include "experts.h"
#include "file.h"
#include "layout.h"
#include "queue.h"
#include "read.h"
#include "residency.h"
#include "stats.h"

namespace moeflux {

class Readers;
struct LeaseState;
class Store;

struct StoreOptions {
    std::vector<std::string> paths;
    std::vector<ExpertLayer> layers;  // by number; those without experts are empty
    int n_slots = 0, floor = 0;
    std::string policy = "lru";
    bool direct = false;
    int n_readers = 4;     // 0: somebody else calls take and finish
    int sweep_slots = 16;  // that a sweep may take from others at a time
    int64_t under_way = 0;  // bytes that readers may be reading at a time, because a demand waits for them; 0: any
};

// One component of one expert on its way into a slot. Keeps the memory alive.
struct Job {
    int slot = 0, component = 0, layer = 0, expert = 0;
    Extent extent;
    uint8_t* to = nullptr;
    bool in_place = false;  // see ExtentReader
    bool hint = false;      // nobody had asked for it when the read began
    Scalar type = Scalar::integer;
    File* file = nullptr;
    std::chrono::steady_clock::time_point start;
    std::shared_ptr<const Arena> memory;
    std::unique_ptr<uint8_t[]> own;  // `to`, of what is kept outside slots
};

// Permission to read slots. Movable; gives everything back when it dies. One thread at a time uses a lease.
class Lease {
public:
    Lease();
    Lease(Lease&&) noexcept;
    Lease& operator=(Lease&&) noexcept;
    ~Lease();

    // The experts that are ready and were not handed out yet, in ascending order: at first all that were in memory, later
    // those that have arrived. With `wait`, blocks until there is one; none: all were handed out (or none is ready now).
    // Throws Error where a read failed, the store was closed, no slot can ever become free, or `listener` says so while it waits.
    size_t next(std::vector<Expert>& out, bool wait = true, Listener* listener = nullptr);
    // Experts that were handed out and are not needed any more: their slots can take what this lease still waits for.
    void release(const std::vector<Expert>& experts);
    void release();  // everything; the lease is empty afterwards
    // Experts not handed out yet, and those of them that have no slot yet.
    size_t left() const;
    size_t waiting() const;

    // The bytes of a component of an expert that was handed out and not released.
    const uint8_t* bytes(int64_t expert, int component) const;
    // For whoever looks at bytes after the lease and the store are gone.
    std::shared_ptr<const Arena> memory() const;

private:
    friend class Store;
    Lease(std::shared_ptr<Store> store, std::unique_ptr<LeaseState> state);
    std::shared_ptr<Store> store_;
    std::unique_ptr<LeaseState> state_;
};

class Store : public std::enable_shared_from_this<Store> {
public:
    static std::shared_ptr<Store> open(StoreOptions options);  // throws Error, std::bad_alloc
    ~Store();

    // A lease on the distinct experts among these; starts the reads that are missing and waits for none. The last `n_swept`
    // ids are a prompt's: each is used once and there may be more than fit (see Residency).
    Lease acquire(int layer, const int64_t* ids, int64_t n, int64_t n_swept = 0);
    // Experts that will likely be asked for: reads those that are missing where a slot can be had and no demand wants it.
    // `sweep`: by a sweep; takes no slot but free ones and what sweeps left behind. `soon`: before other hints.
    void hint(int layer, const int64_t* ids, int64_t n, bool sweep = false, bool soon = false);
    // A new token begins. Hints that waited for a whole token are dropped. Returns whether memory is crowded (see Residency).
    bool next_token();
    // Ends the readers after the reads they are in, and every wait with an error. Leases keep their memory. Idempotent.
    void close();

    StoreStats stats() const;
    std::vector<std::string> take_notes();  // what a person should be told once
    std::vector<uint8_t> resident() const;  // by layer and expert (as many as the layer with most has): 1 where it is in memory
    int n_layers() const { return int(options_.layers.size()); }
    const ExpertLayer& layer(int layer) const { return options_.layers.at(size_t(layer)); }
    int depth() const { return depth_; }  // reads of weights that can be under way at a time
    int64_t n_bytes() const { return n_bytes_; }  // of all experts
    int64_t slot_bytes() const { return slot_bytes_; }
    // Bytes of a slot for experts with components of these sizes.
    static int64_t slot_bytes(const std::vector<int64_t>& sizes, bool direct) { return SlotLayout(sizes, direct).bytes; }

    // For readers. The next job, or none when the time is over or the store is closed.
    std::optional<Job> take(std::chrono::nanoseconds patience);
    // `message`: instead of what errno says. Checks the numbers of a read that succeeded.
    void finish(const Job& job, const ReadResult& result, const std::string& message = {});
    const std::atomic<bool>& stopping() const { return stopping_; }
    bool closed() const { return stopping_.load(); }
    bool here() const { return process_.here(); }  // in the process that opened it
    Error closed_error() const;

    struct SlotView {
        int layer, expert, pins;
        const char* state;
    };
    std::vector<SlotView> slots() const;  // for tests

private:
    friend class Lease;
    enum class State : int { empty, filling, ready, failed };
    struct Slot {
        State state = State::empty;
        int layer = -1, expert = -1;  // of the bytes in it, also when it is detached
        int todo = 0;                 // components that it was filled with, of which
        int left = 0, running = 0;    // so many are not there yet; are being read
        bool hint_read = false;       // was first wanted by a hint
        int64_t hint_tick = 0;
        std::unique_ptr<Error> error;
        Matrix gate, up, down;
    };
    using Lock = std::unique_lock<std::mutex>;
    using Clock = std::chrono::steady_clock;

    explicit Store(StoreOptions options);
    void check(int layer, const int64_t* ids, int64_t n) const;
    Lock lock() const;  // throws in another process

    // All of these are called with the mutex held.
    const std::vector<int>& distinct(int layer, const int64_t* ids, int64_t n);
    Slot& slot(int i) { return slots_[size_t(i)]; }
    int job(int slot, int component) const { return slot * n_components_ + component; }
    // One of them, who wakes the next: whoever asked has something better to do.
    void wake_readers() {
        if (n_idle_ && may_read()) work_.notify_one();
    }
    bool may_read() const;
    int64_t expert_bytes(int layer) const { return expert_bytes_[size_t(layer)]; }
    uint8_t* component(const Arena& memory, int slot, int layer, int expert, int component) const;
    bool there(int layer, int expert, int component) const;  // kept, and was read
    void keep(const Job& job);
    // Slots (fill.cpp).
    int take_slot(int layer, int expert, Why why, bool desperate);
    void fill(int slot, int layer, int expert, Priority priority);
    bool untouched(const Slot& s) const { return s.running == 0 && s.left == s.todo; }
    void unqueue(int slot);
    void cancel(int slot);
    bool cancel_a_hint();
    void demanded(int slot, Why why);
    void settle(int slot);
    void doom(int slot);
    void settle_failed(int slot);
    void unpin(int slot);
    std::unique_ptr<Error> describe(const Job& job, const ReadResult& result, const std::string& message, bool finite) const;
    // Leases (leasing.cpp).
    void join(LeaseState& l, size_t want, int slot);
    // Whether an expert is likely gone after this use. A few of these at a time are enough.
    bool passing(bool swept) const { return swept || residency_.crowded(); }
    bool place_next(LeaseState& l, bool desperate);
    void serve_waiting();
    bool starving() const;
    void collect(LeaseState& l, std::vector<Expert>& out);
    bool hopeless(const LeaseState& l) const;
    Error full_error(const LeaseState& l) const;
    size_t next(LeaseState& l, std::vector<Expert>& out, bool wait, Listener* listener);
    void wait_for_experts(Lock& lock, LeaseState& l, Listener* listener);
    void release(LeaseState& l, int64_t expert);
    void slots_given_back();
    void end(std::unique_ptr<LeaseState> l);

    StoreOptions options_;
    int n_components_ = 0;  // of the layer with most
    int depth_ = 1;
    int64_t slot_bytes_ = 0;
    std::vector<SlotLayout> layouts_;  // by layer
    std::vector<KeptLayout> kept_layouts_;
    std::vector<int64_t> expert_bytes_;  // in a slot
    int64_t n_bytes_ = 0;
    Files files_;

    const Process process_;
    mutable std::mutex mutex_;
    std::condition_variable ready_, work_;  // for who waits for experts; for readers
    Residency residency_;
    JobQueue queue_;
    Order hinted_;  // slots that are filling for a hint that nobody has asked for
    std::vector<Slot> slots_;
    std::shared_ptr<const Arena> memory_;
    std::vector<LeaseState*> live_;  // oldest first
    std::vector<std::unique_ptr<LeaseState>> spare_;
    std::vector<int> wanted_;       // scratch of distinct()
    std::vector<uint32_t> marks_;   // by expert: the call that wanted it
    uint32_t mark_ = 0;
    int n_waiting_ = 0;             // experts of all leases without a slot
    int n_filling_ = 0, n_running_ = 0, n_waiters_ = 0, n_idle_ = 0;
    int64_t under_way_ = 0;  // bytes being read
    int64_t bytes_resident_ = 0;
    std::vector<std::vector<uint16_t>> kept_;  // by layer and expert: the components that are kept and there, a bit each
    Clock::time_point busy_since_;
    StoreStats stats_;
    std::vector<std::string> notes_;
    bool closed_ = false;
    std::atomic<bool> stopping_{false};
    std::unique_ptr<Readers> readers_;  // last: ends before what it works on
};

}  // namespace moeflux
