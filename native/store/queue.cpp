#include "queue.h"

namespace moeflux {

void JobQueue::push(int job, Priority priority) {
    if (priority == Priority::demand) demands_.push_back(job);
    else if (priority == Priority::hint) hints_.push_back(job);
    else hints_.push_front(job);
}

int JobQueue::pop() {
    Order& from = demands_.empty() ? hints_ : demands_;
    const int job = from.first();
    if (job >= 0) from.remove(job);
    return job;
}

bool JobQueue::remove(int job) {
    Order& from = demands_.has(job) ? demands_ : hints_;
    if (!from.has(job)) return false;
    from.remove(job);
    return true;
}

bool JobQueue::promote(int job) {
    if (!hints_.has(job)) return false;
    hints_.remove(job);
    demands_.push_back(job);
    return true;
}

void JobQueue::clear() {
    while (pop() >= 0) {
    }
}

}  // namespace moeflux
