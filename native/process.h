// Which process this is. After fork() a child has the memory of its parent but none of its threads, and its locks as they were:
// whatever owns threads or locks is of no use there, and must not be waited for.
#pragma once

#include "error.h"

namespace moeflux {

class Process {
public:
    Process() : id_(now()) {}

    bool here() const { return id_ == now(); }  // cheap: no system call
    // Throws Error of kind `state` in any other process than the one where this was made.
    void check(const char* what) const;

private:
    static int now();
    int id_;
};

}  // namespace moeflux
