#include "pool.h"

#include <chrono>

namespace moeflux {

namespace {

constexpr uint64_t kField = (uint64_t(1) << 20) - 1;

int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads, int spin_us) : spin_ns_(int64_t(spin_us) * 1000) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { loop(i); });
}

Pool::~Pool() {
    stop_ = true;
    wake_.fetch_add(1);
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

// Takes chunks until none is left, always one ahead; returns the number of the job seen last.
uint64_t Pool::work(int worker) {
    uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    for (;;) {
        const uint64_t chunks = (ticket >> 20) & kField;
        if ((ticket & kField) >= chunks) return ticket >> 40;
        // The job cannot be replaced before a chunk that was taken is counted as done, so body_, context_ and the next
        // ticket are this job's.
        const uint64_t next = ticket_.fetch_add(1, std::memory_order_acq_rel);
        const int64_t after = (next & kField) < chunks ? int64_t(next & kField) : -1;
        body_(context_, int64_t(ticket & kField), after, worker);
        done_.fetch_add(1, std::memory_order_release);
        ticket = next;
    }
}

void Pool::loop(int worker) {
    uint64_t last = 0;
    for (;;) {
        const int64_t since = now_ns();
        while ((ticket_.load(std::memory_order_acquire) >> 40) == last) {
            if (stop_.load(std::memory_order_relaxed)) return;
            for (int i = 0; i < 8; ++i) pause();
            if (now_ns() - since > spin_ns_) {
                sleepers_.fetch_add(1);
                const uint32_t seen = wake_.load();
                if ((ticket_.load() >> 40) == last && !stop_.load()) wake_.wait(seen);
                sleepers_.fetch_sub(1);
            }
        }
        last = work(worker);
    }
}

void Pool::start(Body body, void* context, int64_t chunks) {
    body_ = body;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    job_ = (job_ + 1) & ((uint64_t(1) << 24) - 1);
    ticket_.store(job_ << 40 | uint64_t(chunks) << 20);
    wake_.fetch_add(1);
    if (sleepers_.load() > 0) wake_.notify_all();
    work(0);
    for (int64_t turns = 0; done_.load(std::memory_order_acquire) != chunks; ++turns) {
        pause();
        if (turns > 5000) std::this_thread::yield();
    }
}

}  // namespace moeflux
