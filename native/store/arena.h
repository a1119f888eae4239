// The memory of all slots, in large blocks that the kernel fills when they are first written to, and of what is kept of every
// expert of a layer beside them.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "../memory.h"

namespace moeflux {

class Arena {
public:
    // `kept`: bytes of each layer, or 0.
    Arena(int n_slots, int64_t slot_bytes, const std::vector<int64_t>& kept)
        : slot_bytes_(slot_bytes), per_block_(int(std::clamp<int64_t>(kBlockBytes / slot_bytes, 1, n_slots))) {
        for (int first = 0; first < n_slots; first += per_block_)
            blocks_.push_back(std::make_unique<Block>(size_t(std::min(per_block_, n_slots - first)) * size_t(slot_bytes)));
        for (const int64_t bytes : kept) kept_.push_back(bytes ? std::make_unique<Block>(size_t(bytes)) : nullptr);
    }

    uint8_t* slot(int i) const { return blocks_[size_t(i / per_block_)]->data() + int64_t(i % per_block_) * slot_bytes_; }
    uint8_t* kept(int layer) const { return kept_[size_t(layer)]->data(); }

private:
    static constexpr int64_t kBlockBytes = 256 << 20;
    int64_t slot_bytes_;
    int per_block_;
    std::vector<std::unique_ptr<Block>> blocks_, kept_;
};

}  // namespace moeflux
