// Scratch of the machine: buffers by use (two that are needed together are never the same one), and activations as records;
// and work in turns that need little of it.
#pragma once

#include "machine.h"

namespace moeflux {

enum Buffers : size_t {
    kRecords = 0,  // and the next ones, a buffer for each kind of activations
    kRecordKinds = 5,  // all there are: floats, nibbles, and `natural` in groups of 32, 64 and 128
    kPointers = kRecords + kRecordKinds,
    kInner,
    kFirst,
    kSecond,
    kThird,
    kAngles,
    kFloatBuffers,  // Machine::kFloats of them
    kBuffers = kFloatBuffers + Machine::kFloats,
};

// Records of x in every layout that some matrix wants; made when first asked for.
class Machine::RecordKinds {
public:
    explicit RecordKinds(Machine& m) : m_(m) {}
    RecordKinds(Machine& m, const float* x, int64_t tokens) : m_(m), x_(x), tokens_(tokens) {}
    void start(const float* x, int64_t tokens) {
        x_ = x;
        tokens_ = tokens;
        n_ = 0;
    }
    const uint8_t* const* of(const Matrix& w) {
        const Layout wanted = m_.layout(w);
        for (size_t i = 0; i < n_; ++i)
            if (made_[i].layout == wanted && (wanted == Layout::floats || made_[i].group == w.group)) return made_[i].records;
        require(n_ < kRecordKinds, "more kinds of activations than there are");
        made_[n_] = {wanted, w.group, m_.records(x_, tokens_, w.cols, wanted, w.group, kRecords + n_)};
        return made_[n_++].records;
    }

private:
    struct Made {
        Layout layout;
        int group;
        const uint8_t* const* records;
    };
    Machine& m_;
    const float* x_ = nullptr;
    int64_t tokens_ = 0;
    Made made_[kRecordKinds];
    size_t n_ = 0;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// body(first, n) for all of `total`, in turns of about the same size, `most` at a time.
template <typename Body>
void in_turns(int64_t total, int64_t most, Body body) {
    const int64_t turns = ceil_div(total, most);
    for (int64_t turn = 0, at = 0; turn < turns; ++turn) {
        const int64_t n = ceil_div(total - at, turns - turn);
        body(at, n);
        at += n;
    }
}

}  // namespace moeflux
