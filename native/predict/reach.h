// How far to look ahead: how many experts of a layer are worth a guess, and of how many layers. Hints cost reads: a wrong one
// is wasted, and where the drive has no idle time even a right one only moves a read. So the reach follows the share of hints
// that were asked for in the end, and more must be right when readers are busy; at zero a small probe now and then finds
// out whether times have changed.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moeflux {

class Reach {
public:
    explicit Reach(int most) : most_(most), width_(most) {}

    int width() const { return width_; }  // of the next layer when this one begins
    int far() const { return std::min(width_, sure()); }  // of one that is further away
    int depth() const { return depth_; }
    // After a token: hints that were issued and that were asked for, the share of the readers' time in which they had nothing
    // to read, and the share of the time that the token waited for experts.
    void learn(int64_t issued, int64_t useful, double idle, double stalled);

private:
    int sure() const { return (most_ + 1) / 2; }  // of a router's guesses, in order, are hardly ever wrong
    static constexpr int kWindow = 8;    // tokens between decisions
    static constexpr int kProbe = 8;     // windows without hints before the next probe
    static constexpr int kDeepest = 4;
    int most_, width_, depth_ = 3;
    int tokens_ = 0, off_ = 0;
    int64_t issued_ = 0, useful_ = 0;  // all summed over the window
    double idle_ = 0, stalled_ = 0;
};

}  // namespace moeflux
