#include "async_reader.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>

namespace moeflux {

namespace {

constexpr int64_t kPagesBytes = (128 << 10) + 2 * kPage;  // larger components are read in place, but for odd offsets
constexpr int kTogether = 4;                              // reads that are collected at once while many are under way,
constexpr long kPatienceNs = 100'000;                     // if they come within this time
constexpr int64_t kJudged = 64;                           // reads after which it is clear whether submitting waits for them

long submit_all(aio_context_t context, std::vector<iocb*>& controls) {
    return ::syscall(SYS_io_submit, context, long(controls.size()), controls.data());
}

long get_events(aio_context_t context, long least, std::vector<io_event>& events, timespec* patience) {
    return ::syscall(SYS_io_getevents, context, least, long(events.size()), events.data(), patience);
}

int64_t own_waits() {
    rusage usage = {};
    ::getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nvcsw;
}

}  // namespace

AsyncReaders::Flight* AsyncReaders::flight_of(uint64_t data) { return reinterpret_cast<Flight*>(uintptr_t(data)); }

std::unique_ptr<AsyncReaders> AsyncReaders::open(Store& store, int depth) {
    aio_context_t context = 0;
    if (::syscall(SYS_io_setup, depth, &context) != 0) return nullptr;
    return std::unique_ptr<AsyncReaders>(new AsyncReaders(store, depth, context));
}

AsyncReaders::AsyncReaders(Store& store, int depth, aio_context_t context)
    : store_(store), context_(context), submitting_(store.stopping()), collecting_(store.stopping()) {
    for (int i = 0; i < depth; ++i) {
        flights_.push_back(std::make_unique<Flight>(size_t(kPagesBytes)));
        free_.push_back(flights_.back().get());
    }
    sigset_t all, before;  // signals belong to the threads of the program
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    submitter_ = std::thread([this] { submit(); });
    collector_ = std::thread([this] { collect(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

AsyncReaders::~AsyncReaders() {
    submitter_.join();
    collector_.join();
    ::syscall(SYS_io_destroy, context_);
}

void AsyncReaders::wait_for_free(std::vector<Flight*>& taken) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !free_.empty(); });
    taken.swap(free_);
}

void AsyncReaders::give_back(Flight* flight) {
    flight->job.memory.reset();
    free_.push_back(flight);
    changed_.notify_all();
}

// False where the extent cannot be read past the page cache in one piece.
bool AsyncReaders::prepare(Flight& flight, Job job) {
    flight.job = std::move(job);
    const Extent& extent = flight.job.extent;
    const int descriptor = flight.job.file->direct_descriptor();
    flight.skip = extent.offset % kPage;
    const int64_t all = round_up(flight.skip + extent.length, kPage);
    if (descriptor < 0 || (!flight.job.in_place && all > kPagesBytes)) return false;
    flight.control = {};
    uint8_t* const to = flight.job.in_place ? flight.job.to - flight.skip : flight.pages.data();
    flight.control.aio_data = uint64_t(reinterpret_cast<uintptr_t>(&flight));
    flight.control.aio_lio_opcode = IOCB_CMD_PREAD;
    flight.control.aio_fildes = uint32_t(descriptor);
    flight.control.aio_buf = uint64_t(reinterpret_cast<uintptr_t>(to));
    flight.control.aio_nbytes = uint64_t(all);
    flight.control.aio_offset = extent.offset - flight.skip;
    return true;
}

void AsyncReaders::submit() {
    std::vector<Flight*> ready;
    std::vector<iocb*> controls;
    while (!store_.closed()) {
        wait_for_free(ready);
        controls.clear();
        while (!ready.empty()) {
            const auto patience = controls.empty() ? std::chrono::nanoseconds(std::chrono::hours(1)) : std::chrono::nanoseconds(0);
            std::optional<Job> job = store_.take(patience);
            if (!job) break;
            if (prepare(*ready.back(), std::move(*job))) {
                controls.push_back(&ready.back()->control);
                ready.pop_back();
            } else {
                read_anew(*ready.back(), submitting_);
            }
        }
        const int64_t waits = own_waits();
        const size_t taken = controls.empty() ? 0 : size_t(std::max(0L, submit_all(context_, controls)));
        submitted_ += int64_t(taken);
        waited_ += own_waits() - waits;
        for (size_t i = taken; i < controls.size(); ++i) {
            ready.push_back(flight_of(controls[i]->aio_data));
            read_anew(*ready.back(), submitting_);
        }
        const std::lock_guard lock(mutex_);
        under_way_ += int(taken);
        for (Flight* flight : ready) give_back(flight);
        ready.clear();
        changed_.notify_all();
        if (submitted_ >= kJudged && waited_ > submitted_ / 2) break;
    }
    if (!store_.closed()) {
        store_.note("its file system waits for each direct read; experts are read by a thread for each");
        threads_ = std::make_unique<Readers>(store_, int(flights_.size()));
    }
    const std::lock_guard lock(mutex_);
    over_ = true;
    changed_.notify_all();
}

void AsyncReaders::collect() {
    std::vector<io_event> events(flights_.size());
    for (;;) {
        int under_way;
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [&] { return under_way_ > 0 || over_; });
            if (under_way_ == 0) return;
            under_way = under_way_;
        }
        timespec patience = {0, kPatienceNs};
        const bool many = under_way > 2 * kTogether;
        const long n = get_events(context_, many ? kTogether : 1, events, many ? &patience : nullptr);
        for (long i = 0; i < n; ++i) land(*flight_of(events[size_t(i)].data), int64_t(events[size_t(i)].res));
        const std::lock_guard lock(mutex_);
        for (long i = 0; i < n; ++i, --under_way_) give_back(flight_of(events[size_t(i)].data));
    }
}

// `got`: bytes from the start of the first page, or what went wrong.
void AsyncReaders::land(Flight& flight, int64_t got) {
    const Job& job = flight.job;
    if (got < flight.skip + job.extent.length) return read_anew(flight, collecting_);
    if (!job.in_place) std::memcpy(job.to, flight.pages.data() + flight.skip, size_t(job.extent.length));
    ReadResult result;
    result.done = job.extent.length;
    store_.finish(job, result);
}

void AsyncReaders::read_anew(const Flight& flight, ExtentReader& reader) {
    const Job& job = flight.job;
    store_.finish(job, reader.read(*job.file, job.extent, job.to, job.in_place));
}

}  // namespace moeflux
