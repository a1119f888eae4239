// Python's lock, given back for the time of a native call.
//
// Where Python has ended meanwhile, a thread that wants the lock back is ended by Python inside of that wish, by unwinding its
// stack. Destructors and nanobind's own frames do not let that pass, and the whole process would abort; so such a thread sleeps
// until the process is gone, which is at once.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace moeflux {

class Unlocked {
public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    ~Unlocked() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            for (;;) pause();
        }
    }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

private:
    PyThreadState* state_;
};

}  // namespace moeflux
