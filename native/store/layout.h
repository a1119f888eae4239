// Where the components of an expert lie in a slot.
//
// A direct read moves whole pages of the file into whole pages of memory. A large component is read in place: its region is
// page aligned and has room for the pages around it, so its bytes begin as far into the region as they do into a page of
// the file. A small one, for which those pages would be a waste, is read elsewhere and copied to its region.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

#include "extent.h"

namespace moeflux {

constexpr int64_t kPage = 4096;

constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

struct Region {
    int64_t start = 0;  // in the slot
    bool pages = false;  // page aligned, with room for whole pages of the file
};

struct SlotLayout {
    std::vector<Region> regions;  // one per component; those of size 0 lie elsewhere
    int64_t bytes = 0;            // of the slot; a multiple of a page for direct reads

    SlotLayout(const std::vector<int64_t>& sizes, bool direct);
};

// Where the kept components of a layer's experts lie, side by side for each expert.
struct KeptLayout {
    std::vector<int64_t> starts;  // one per component
    int64_t bytes = 0;            // of one expert; 0: nothing is kept

    explicit KeptLayout(const std::vector<int64_t>& sizes);  // 0: not kept
};

// Whether this extent is read in place. Kernels want their numbers where a number of that type may lie.
inline bool in_place(const Region& region, const Extent& extent) { return region.pages && extent.offset % 4 == 0; }

// Where the bytes of an extent begin.
inline uint8_t* place(uint8_t* slot, const Region& region, const Extent& extent) {
    return slot + region.start + (in_place(region, extent) ? extent.offset % kPage : 0);
}

}  // namespace moeflux
