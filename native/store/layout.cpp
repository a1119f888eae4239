#include "layout.h"

namespace moeflux {

namespace {
constexpr int64_t kLine = 64;
constexpr int64_t kInPlaceBytes = 128 << 10;  // a read below that is cheap to copy
constexpr int64_t kSlackShare = 16;           // pages around a component may cost one part in so many of it
}  // namespace

SlotLayout::SlotLayout(const std::vector<int64_t>& sizes, bool direct) : regions(sizes.size()) {
    for (size_t i = 0; i < sizes.size(); ++i) {
        const int64_t room = round_up(sizes[i], kPage) + kPage;
        if (!direct || sizes[i] < kInPlaceBytes || (room - sizes[i]) * kSlackShare > sizes[i]) continue;
        regions[i] = {bytes, true};
        bytes += room;
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
        if (regions[i].pages) continue;
        regions[i] = {bytes, false};
        bytes += round_up(sizes[i], kLine);
    }
    bytes = round_up(bytes, direct ? kPage : kLine);
}

KeptLayout::KeptLayout(const std::vector<int64_t>& sizes) {
    for (const int64_t size : sizes) {
        starts.push_back(bytes);
        bytes += round_up(size, kLine);
    }
}

}  // namespace moeflux
