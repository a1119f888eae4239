// Reads that wait for a reader: all demands before all hints, first come first served among each, but for hints of what is
// wanted soon, which go before the others. Not thread-safe: the store's mutex guards it.
#pragma once

#include "order.h"

namespace moeflux {

enum class Priority : int { demand, soon, hint };

class JobQueue {
public:
    explicit JobQueue(int n_jobs) : demands_(n_jobs), hints_(n_jobs) {}

    bool has(int job) const { return demands_.has(job) || hints_.has(job); }
    void push(int job, Priority priority);
    int first() const { return demands_.empty() ? hints_.first() : demands_.first(); }  // what pop would give
    int pop();                // -1: none
    bool remove(int job);     // false where it does not wait
    bool promote(int job);    // from hint to demand, where it waits as a hint
    void clear();

private:
    Order demands_, hints_;
};

}  // namespace moeflux
