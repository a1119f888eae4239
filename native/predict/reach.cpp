#include "reach.h"

namespace moeflux {

void Reach::learn(int64_t issued, int64_t useful, double idle, double stalled) {
    issued_ += issued;
    useful_ += useful;
    idle_ += idle;
    stalled_ += stalled;
    if (++tokens_ < kWindow) return;
    const int64_t n = issued_;
    const double share = n > 0 ? double(useful_) / double(n) : 0, spare = idle_ / kWindow;
    const bool waits = stalled_ > 0.02 * kWindow, busy = spare < 0.25;
    const double needed = busy ? 0.6 : 0.35;
    tokens_ = 0;
    idle_ = stalled_ = 0;
    issued_ = useful_ = 0;
    if (width_ == 0) {
        if (++off_ < kProbe) return;
        off_ = 0;
        width_ = std::min(most_, 2);
    } else if (n > 0 && share < needed) {
        if (depth_ > 1) --depth_;
        else width_ /= 2;
    } else if (busy && share < 0.95 && width_ > sure()) {
        --width_;  // what is wrong takes the place of what is right
    } else if (n > 0 && share > needed + 0.2) {
        if (!busy && width_ < most_) ++width_;
        else if (spare > 0.1 && waits && depth_ < kDeepest) ++depth_;
    }
}

}  // namespace moeflux
