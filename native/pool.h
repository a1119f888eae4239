// Persistent worker threads. The caller is worker 0. Each worker has a share of a job's chunks, side by side, so that it reads
// memory in order; one that is done takes chunks from the end of another's share.
//
// A worker that sleeps is never waited for: others take its share, and a late worker finds none left. Workers spin for a
// moment after a job, because the next one usually comes within microseconds, and then sleep, so that an idle engine costs
// nothing and readers have the cores. While they spin they prefetch what the next job will read (`expect`), because memory
// would be idle.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "process.h"

namespace moeflux {

class Pool {
public:
    static constexpr int kRanges = 3;  // of memory that a worker can expect

    explicit Pool(int threads, int spin_us = 500);  // throws Error where the system gives no more threads
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return size_; }

    // The first chunk of a worker's share.
    int64_t share(int64_t chunks, int worker) const { return chunks * worker / size(); }

    // body(chunk, worker) for every chunk in [0, chunks). One caller at a time.
    template <class F>
    void run(int64_t chunks, F&& body) {
        run_ahead(chunks, [&](int64_t chunk, int64_t, int worker) { body(chunk, worker); });
    }

    // body(chunk, next, worker): `next` is the chunk that this worker will most likely do after this one, or -1.
    template <class F>
    void run_ahead(int64_t chunks, F&& body) {
        if (size_ == 1 || chunks <= 1) {
            for (int64_t i = 0; i < chunks; ++i) body(i, i + 1 < chunks ? i + 1 : -1, 0);
            return;
        }
        start([](void* f, int64_t chunk, int64_t next, int worker) {
            (*static_cast<std::remove_reference_t<F>*>(f))(chunk, next, worker);
        },
              const_cast<void*>(static_cast<const void*>(&body)), chunks);
    }

    // Memory that a worker will read soon. Replaces what it expected before under this number; never changes a result.
    void expect(int worker, int which, const uint8_t* p, size_t bytes);

private:
    using Body = void (*)(void*, int64_t chunk, int64_t next, int worker);
    struct alignas(64) Worker {
        std::atomic<uint64_t> share{0};  // job number (24 bits) | end (20) | begin (20)
        alignas(64) std::atomic<const uint8_t*> at[kRanges] = {};
        std::atomic<const uint8_t*> end[kRanges] = {};
    };
    void start(Body body, void* context, int64_t chunks);
    int64_t take(int worker, uint64_t job);
    void work(int worker, uint64_t job);
    bool prefetch_some(int worker);
    void loop(int worker);
    void end();

    const int size_;
    std::unique_ptr<Worker[]> of_;  // by worker
    alignas(64) std::atomic<uint64_t> job_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<uint32_t> wake_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    Body body_ = nullptr;
    void* context_ = nullptr;
    int64_t spin_ns_;
    const Process process_;
    std::unique_ptr<std::vector<std::thread>> workers_;
};

}  // namespace moeflux
