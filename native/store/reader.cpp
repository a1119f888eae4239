#include "reader.h"

#include <csignal>

#include "store.h"

namespace moeflux {

namespace {

void work(Store& store, ExtentReader& reader) {
    while (!store.closed())
        if (const auto job = store.take(std::chrono::hours(1)))
            store.finish(*job, reader.read(*job->file, job->extent, job->to, job->in_place));
}

}  // namespace

Readers::Readers(Store& store, int n) {
    // Signals belong to the threads of the program, not to these.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        for (int i = 0; i < n; ++i) {
            auto reader = std::make_unique<ExtentReader>(store.stopping());  // here, where a lack of memory can be told
            threads_.emplace_back([&store, own = std::move(reader)] { work(store, *own); });
        }
    } catch (const std::exception& error) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        store.close();
        for (std::thread& thread : threads_) thread.join();
        throw Error(Error::Kind::full, std::to_string(n) + " readers cannot be started: " + error.what());
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Readers::~Readers() {
    for (std::thread& thread : threads_) thread.join();
}

}  // namespace moeflux
