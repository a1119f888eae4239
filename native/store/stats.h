// What the store has done so far, and what it holds now. Counters only grow. They add up:
//   asked = hits + late + joined + misses
//   hints_issued = hints_useful + hints_wasted + hints_cancelled + hints_failed + hints_unused
#pragma once

#include <cstdint>

namespace moeflux {

struct StoreStats {
    int64_t acquires = 0, asked = 0;  // leases; distinct experts in them
    int64_t hits = 0;                 // were in memory
    int64_t late = 0;                 // were on their way for a hint
    int64_t joined = 0;               // were on their way for another lease
    int64_t misses = 0;               // had to be read

    int64_t hints_issued = 0, hints_dropped = 0;  // got a slot; found none
    int64_t hints_cancelled = 0;                  // taken back before all bytes were there
    int64_t hints_completed = 0;                  // all bytes arrived
    int64_t hints_failed = 0;                     // the read failed before anybody asked
    int64_t hints_useful = 0, hints_wasted = 0;   // asked for in time; evicted before anybody asked

    int64_t bytes_demand = 0, bytes_hint = 0;  // read, by what they were first wanted for
    int64_t evictions = 0, retries = 0, errors = 0;
    int64_t stall_ns = 0;      // that leases were waited for
    int64_t read_busy_ns = 0;  // with at least one read under way
    int64_t read_ns = 0;       // of all reads together
    int64_t reads = 0;         // components read

    int64_t slots = 0, slots_used = 0, bytes_resident = 0, hints_unused = 0;  // now
};

}  // namespace moeflux
