#include "pool.h"

#include <chrono>

namespace moeflux {

namespace {

constexpr uint64_t kField = (uint64_t(1) << 20) - 1;
constexpr uint64_t kJobs = (uint64_t(1) << 24) - 1;

uint64_t begin_of(uint64_t share) { return share & kField; }
uint64_t end_of(uint64_t share) { return (share >> 20) & kField; }
uint64_t job_of(uint64_t share) { return share >> 40; }

int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads, int spin_us) : size_(threads), of_(new Worker[size_t(threads)]), spin_ns_(int64_t(spin_us) * 1000),
      workers_(std::make_unique<std::vector<std::thread>>()) {
    try {
        for (int i = 1; i < threads; ++i) workers_->emplace_back([this, i] { loop(i); });
    } catch (const std::exception& error) {
        end();
        throw Error(Error::Kind::full, std::to_string(threads) + " threads cannot be started: " + error.what(),
                    "option 'threads'");
    }
}

Pool::~Pool() { end(); }

void Pool::end() {
    if (!process_.here()) {  // a child of fork(): they are not there
        (void)workers_.release();
        return;
    }
    stop_ = true;
    wake_.fetch_add(1);
    wake_.notify_all();
    for (auto& worker : *workers_) worker.join();
    workers_->clear();
}

void Pool::expect(int worker, int which, const uint8_t* p, size_t bytes) {
    Worker& w = of_[size_t(worker)];
    w.end[which].store(nullptr, std::memory_order_relaxed);
    w.at[which].store(p, std::memory_order_relaxed);
    w.end[which].store(p ? p + bytes : nullptr, std::memory_order_relaxed);
}

// A few lines of what the worker expects; false when there is nothing left. The two ends may be seen from different calls of
// `expect`: prefetching a wrong line does no harm, and the bound keeps it short.
bool Pool::prefetch_some(int worker) {
    constexpr ptrdiff_t kLine = 64, kStep = 16 * kLine, kMost = ptrdiff_t(1) << 21;
    Worker& w = of_[size_t(worker)];
    for (int i = 0; i < kRanges; ++i) {
        const uint8_t *at = w.at[i].load(std::memory_order_relaxed), *end = w.end[i].load(std::memory_order_relaxed);
        if (!end || at >= end || end - at > kMost) continue;
        for (ptrdiff_t d = 0; d < kStep; d += kLine) __builtin_prefetch(at + d, 0, 2);
        w.at[i].compare_exchange_strong(at, at + kStep, std::memory_order_relaxed);
        return true;
    }
    return false;
}

// From the front of the own share, else from the back of another's; -1 when the job has no chunk left. The job's number is
// part of what is exchanged, so a late worker cannot take a chunk of a job that it has not seen.
int64_t Pool::take(int worker, uint64_t job) {
    for (int i = 0; i < size_; ++i) {
        auto& share = of_[size_t((worker + i) % size_)].share;
        uint64_t seen = share.load(std::memory_order_acquire);
        while (job_of(seen) == job && begin_of(seen) < end_of(seen)) {
            const uint64_t after = i == 0 ? seen + 1 : seen - (uint64_t(1) << 20);
            if (share.compare_exchange_weak(seen, after, std::memory_order_acq_rel, std::memory_order_acquire))
                return int64_t(i == 0 ? begin_of(seen) : end_of(seen) - 1);
        }
    }
    return -1;
}

void Pool::work(int worker, uint64_t job) {
    // A job cannot be replaced before a chunk that was taken is counted as done, so body_ and context_ are this job's.
    for (int64_t chunk; (chunk = take(worker, job)) >= 0;) {
        const uint64_t share = of_[size_t(worker)].share.load(std::memory_order_relaxed);
        const bool more = begin_of(share) < end_of(share);
        body_(context_, chunk, more ? int64_t(begin_of(share)) : -1, worker);
        done_.fetch_add(1, std::memory_order_release);
    }
}

void Pool::loop(int worker) {
    uint64_t last = 0;
    for (;;) {
        const int64_t since = now_ns();
        while (job_.load(std::memory_order_acquire) == last) {
            if (stop_.load(std::memory_order_relaxed)) return;
            if (prefetch_some(worker)) continue;
            for (int i = 0; i < 8; ++i) pause();
            if (now_ns() - since > spin_ns_) {
                sleepers_.fetch_add(1);
                const uint32_t seen = wake_.load();
                if (job_.load() == last && !stop_.load()) wake_.wait(seen);
                sleepers_.fetch_sub(1);
            }
        }
        last = job_.load(std::memory_order_acquire);
        work(worker, last);
    }
}

void Pool::start(Body body, void* context, int64_t chunks) {
    if (chunks > int64_t(kField))
        throw Error(Error::Kind::input, "a job of " + std::to_string(chunks) + " chunks is too large");
    body_ = body;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = (job_.load(std::memory_order_relaxed) + 1) & kJobs;
    for (int w = 0; w < size_; ++w)
        of_[size_t(w)].share.store(job << 40 | uint64_t(share(chunks, w + 1)) << 20 | uint64_t(share(chunks, w)),
                                   std::memory_order_release);
    job_.store(job);
    wake_.fetch_add(1);
    if (sleepers_.load() > 0) wake_.notify_all();
    work(0, job);
    for (int64_t turns = 0; done_.load(std::memory_order_acquire) != chunks; ++turns) {
        if (!prefetch_some(0)) pause();
        if (turns > 5000) std::this_thread::yield();
    }
}

}  // namespace moeflux
