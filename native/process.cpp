#include "process.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace moeflux {

namespace {

std::atomic<int>& current() {
    static std::atomic<int> id = [] {
        pthread_atfork(nullptr, nullptr, [] { current().store(getpid(), std::memory_order_relaxed); });
        return getpid();
    }();
    return id;
}

}  // namespace

int Process::now() { return current().load(std::memory_order_relaxed); }

void Process::check(const char* what) const {
    if (here()) return;
    throw Error(Error::Kind::state,
                std::string(what) + " was opened in process " + std::to_string(id_) + " and this is process " +
                    std::to_string(now()) + ", which has none of its threads",
                {}, "load the model again in this process");
}

}  // namespace moeflux
