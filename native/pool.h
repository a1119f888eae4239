// Persistent worker threads. The caller is worker 0; chunks of a job are taken one by one by whoever is free.
//
// A worker that sleeps is never waited for: `run` returns when every chunk is done, and a late worker finds none left.
// Workers spin for a moment after a job, because the next one usually comes within microseconds, and then sleep, so that
// an idle engine costs nothing and readers have the cores.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace moeflux {

class Pool {
public:
    explicit Pool(int threads, int spin_us = 500);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return int(workers_.size()) + 1; }

    // body(chunk, worker) for every chunk in [0, chunks). One caller at a time.
    template <class F>
    void run(int64_t chunks, F&& body) {
        run_ahead(chunks, [&](int64_t chunk, int64_t, int worker) { body(chunk, worker); });
    }

    // body(chunk, next, worker): `next` is the chunk that this worker will do after this one, or -1.
    template <class F>
    void run_ahead(int64_t chunks, F&& body) {
        if (workers_.empty() || chunks <= 1) {
            for (int64_t i = 0; i < chunks; ++i) body(i, i + 1 < chunks ? i + 1 : -1, 0);
            return;
        }
        start([](void* f, int64_t chunk, int64_t next, int worker) {
            (*static_cast<std::remove_reference_t<F>*>(f))(chunk, next, worker);
        },
              const_cast<void*>(static_cast<const void*>(&body)), chunks);
    }

private:
    using Body = void (*)(void*, int64_t chunk, int64_t next, int worker);
    void start(Body body, void* context, int64_t chunks);
    uint64_t work(int worker);
    void loop(int worker);

    // Job number (24 bits) | chunks (20) | next chunk (20): one addition takes a chunk and tells of which job.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<uint32_t> wake_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    Body body_ = nullptr;
    void* context_ = nullptr;
    uint64_t job_ = 0;
    int64_t spin_ns_;
    std::vector<std::thread> workers_;
};

}  // namespace moeflux
