// Direct reads that are begun together and waited for together: one thread submits, one collects. Beside computing threads that
// matters, because a thread per read wakes, runs for microseconds and sleeps again for every one of them.
//
// Some file systems read within the call that should only begin a read. A submitting thread that finds itself asleep there
// starts a thread for each read after all, and ends. What does not arrive whole and at once (an error, the end of a file, a file system that refuses) is read anew by an
// ExtentReader, which knows what to do.
#pragma once

#include <linux/aio_abi.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "reader.h"
#include "store.h"

namespace moeflux {

class AsyncReaders {
public:
    // `depth`: reads under way at most. Null where the system has no such reads.
    static std::unique_ptr<AsyncReaders> open(Store& store, int depth);
    ~AsyncReaders();  // joins; the store must be closed by then

private:
    struct Flight {
        Job job;
        iocb control = {};
        int64_t skip = 0;  // bytes before the extent in its first page
        Block pages;       // for components that are not read in place

        explicit Flight(size_t bytes) : pages(bytes) {}
    };

    AsyncReaders(Store& store, int depth, aio_context_t context);
    void submit();
    void collect();
    bool prepare(Flight& flight, Job job);
    void land(Flight& flight, int64_t got);
    void read_anew(const Flight& flight, ExtentReader& reader);
    void wait_for_free(std::vector<Flight*>& taken);
    void give_back(Flight* flight);  // with the mutex held
    static Flight* flight_of(uint64_t data);

    Store& store_;
    aio_context_t context_;
    std::vector<std::unique_ptr<Flight>> flights_;
    ExtentReader submitting_, collecting_;  // of either thread, for what has to be read in another way

    std::mutex mutex_;  // guards the following
    std::condition_variable changed_;
    std::vector<Flight*> free_;
    int under_way_ = 0;
    bool over_ = false;  // nothing more will be submitted
    int64_t submitted_ = 0, waited_ = 0;  // reads, and times that submitting them slept: of the submitting thread alone
    std::unique_ptr<Readers> threads_;     // instead, where it slept too often
    std::thread submitter_, collector_;
};

}  // namespace moeflux
