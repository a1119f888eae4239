// Affine 4-bit, groups of 64, bf16 scales: matrix-vector and matrix-matrix. What instruction sets have in common; included by
// their own parts (affine4_avx512.h, affine4_avx2.h), which end with affine4_rows.h.
//
// Vector lanes are rows, so nothing is ever summed across lanes in floating point and the order that impl.h states holds
// by itself. Up to four tokens the matrix streams through once, each line of codes unpacked for all of them. Beyond,
// a tile of rows is unpacked once, transposed so that a lane is a row, and used for all tokens.
//
// A token's record: for each pair of groups 128 bytes (32 even elements of the first, 32 of the second, then the odd
// ones), so that unpacking nibbles needs no shuffle; then scales and sums, one float per group each.
#pragma once

namespace {

constexpr int kMaxGroups = int(kMaxCols / 64);
constexpr int kTileGroups = 4;  // groups of a tile that are unpacked at a time; even

MF_INLINE int pairs_of(int64_t cols) { return int(cols / 64 + 1) / 2; }
MF_INLINE const float* record_scales(const uint8_t* record, int pairs) { return (const float*)(record + size_t(pairs) * 128); }
MF_INLINE const float* record_sums(const uint8_t* record, int pairs) { return (const float*)(record + size_t(pairs) * 136); }

// The second group of the last pair, where a row has an odd number of groups.
MF_INLINE void clear_last_group(uint8_t* record, int pairs) {
    uint8_t* codes = record + size_t(pairs - 1) * 128 + 32;
    memset(codes, 0, 32);
    memset(codes + 64, 0, 32);
    float* scales = (float*)(record + size_t(pairs) * 128);
    scales[2 * pairs - 1] = scales[4 * pairs - 1] = 0;
}

// What to prefetch while sixteen rows are worked on: nothing, what lies behind them, or the start of other rows.
struct Upcoming {
    const uint8_t *codes = nullptr, *scales = nullptr, *biases = nullptr;  // of the sixteen rows that come next
};

// Lines of the rows that come next, spread over the work as prefetches.
struct Ahead {
    const uint8_t* at = nullptr;
    const uint8_t* end = nullptr;
    int lines = 0;  // per group of one block of tokens
};

}  // namespace
