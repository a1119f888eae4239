// Affine 4-bit, a range of rows: tiles over tokens, tails, prefetches. Included by the part of an instruction set, which has
// `kTokenBlock`, `Tile`, `transpose_scales`, `unpack_pair`, `stream16` and `multiply`.
#pragma once

namespace {

struct alignas(64) Workspace {
    Tile<4> wide;
    Tile<1> narrow;
    alignas(64) float acc[kMostTokens * 64];
    alignas(64) uint8_t codes[16 * kMaxCols / 2];
    alignas(64) uint16_t scales[16 * kMaxGroups], biases[16 * kMaxGroups];
};

template <int MB>
__attribute__((noinline)) void multiply_all(const Tile<MB>& tile, int first_group, int count, const uint8_t* const* records,
                                            int tokens, int pairs, float* acc, Ahead& ahead) {
    const int blocks = (tokens + kTokenBlock - 1) / kTokenBlock;
    for (int i = 0, t = 0; i < blocks; ++i) {
        const int n = (tokens - t + blocks - i - 1) / (blocks - i);
        float* a = acc + size_t(t) * MB * 16;
        const uint8_t* from = ahead.at;
        const int lines = ahead.at < ahead.end ? ahead.lines : 0;
        ahead.at += size_t(lines) * size_t(count) * 64;
        switch (n) {
            case 1: multiply<MB, 1>(tile, first_group, count, records + t, pairs, a, from, lines); break;
            case 2: multiply<MB, 2>(tile, first_group, count, records + t, pairs, a, from, lines); break;
            case 3: multiply<MB, 3>(tile, first_group, count, records + t, pairs, a, from, lines); break;
            case 4: multiply<MB, 4>(tile, first_group, count, records + t, pairs, a, from, lines); break;
            case 5: multiply<MB, 5>(tile, first_group, count, records + t, pairs, a, from, lines); break;
            default: multiply<MB, 6>(tile, first_group, count, records + t, pairs, a, from, lines); break;
        }
        t += n;
    }
}

template <int MB>
MF_INLINE void tile_rows(const uint8_t* codes, const uint16_t* scales, const uint16_t* biases, int64_t cols,
                         const uint8_t* const* records, int tokens, float* acc, Tile<MB>& tile, Ahead& ahead) {
    const int groups = int(cols / 64), pairs = pairs_of(cols);
    const size_t stride = size_t(cols) / 2;
    memset(acc, 0, size_t(tokens) * MB * 64);
    for (int m = 0; m < MB; ++m) {
        transpose_scales(scales + size_t(m) * 16 * groups, groups, &tile.scales[0][m * 16], MB * 16, [] {});
        transpose_scales(biases + size_t(m) * 16 * groups, groups, &tile.biases[0][m * 16], MB * 16, [] {});
    }
    for (int g = 0; g < groups; g += kTileGroups) {
        const int count = groups - g < kTileGroups ? groups - g : kTileGroups;
        for (int m = 0; m < MB; ++m)
            for (int gl = 0; gl < count; gl += 2)
                unpack_pair<MB>(codes + m * 16 * stride + size_t(g + gl) * 32, stride, tile, gl, m, gl + 1 >= count);
        multiply_all<MB>(tile, g, count, records, tokens, pairs, acc, ahead);
    }
}

// --- a range of rows ------------------------------------------------------------------------------------------------

// The last rows of a matrix, fewer than sixteen, copied so that kernels may read sixteen.
MF_INLINE void copy_tail(const Matrix& m, int64_t row, int n, Workspace& ws) {
    const size_t stride = size_t(m.cols) / 2, groups = size_t(m.cols / 64);
    memset(ws.codes, 0, 16 * stride);
    memset(ws.scales, 0, 32 * groups);
    memset(ws.biases, 0, 32 * groups);
    memcpy(ws.codes, m.weight + size_t(row) * stride, size_t(n) * stride);
    memcpy(ws.scales, m.scales + size_t(row) * groups * 2, size_t(n) * groups * 2);
    memcpy(ws.biases, m.biases + size_t(row) * groups * 2, size_t(n) * groups * 2);
}

template <int NT>
__attribute__((noinline)) void stream_rows(const Matrix& m, const uint8_t* const* records, float* const* y, int64_t first,
                                           int64_t last, Next next, Workspace& ws) {
    const size_t stride = size_t(m.cols) / 2, groups = size_t(m.cols / 64);
    const auto from = [](const Matrix& of, int64_t row) {
        const size_t per_row = size_t(of.cols / 64) * 2;
        return Upcoming{of.weight + size_t(row) * (size_t(of.cols) / 2), of.scales + size_t(row) * per_row,
                        of.biases + size_t(row) * per_row};
    };
    // Prefetching what has just been read is harmless, which is what a range without a successor does.
    const Upcoming end = next.matrix ? from(*next.matrix, next.row) : from(m, first);
    int64_t r = first;
    for (; r + 16 <= last; r += 16)
        stream16<NT>(m.weight + size_t(r) * stride, (const uint16_t*)m.scales + size_t(r) * groups,
                     (const uint16_t*)m.biases + size_t(r) * groups, m.cols, records, y, r, 16,
                     r + 32 <= last ? from(m, r + 16) : end);
    if (r < last) {
        copy_tail(m, r, int(last - r), ws);
        stream16<NT>(ws.codes, ws.scales, ws.biases, m.cols, records, y, r, int(last - r), end);
    }
}

void multiply_rows(const Matrix& m, const uint8_t* const* records, int tokens, float* const* y, int64_t first, int64_t last,
                   Next next, Workspace& ws) {
    const size_t stride = size_t(m.cols) / 2, groups = size_t(m.cols / 64);
    const size_t units = groups * size_t((tokens + kTokenBlock - 1) / kTokenBlock);  // steps of a tile
    // The tile behind a row, or behind the range: its codes step by step, its scales, which are few, at once.
    const auto expect = [units](const Matrix& of, int64_t row) {
        const size_t bytes = 64 * size_t(of.cols) / 2, per_row = size_t(of.cols / 64) * 2;
        for (size_t i = 0; i < 64 * per_row; i += 64) {
            _mm_prefetch((const char*)(of.scales + size_t(row) * per_row + i), _MM_HINT_T1);
            _mm_prefetch((const char*)(of.biases + size_t(row) * per_row + i), _MM_HINT_T1);
        }
        const uint8_t* codes = of.weight + size_t(row) * size_t(of.cols) / 2;
        return Ahead{codes, codes + bytes, int((bytes / 64 + units - 1) / units)};
    };
    int64_t r = first;
    for (; r + 64 <= last; r += 64) {
        const uint8_t* codes = m.weight + size_t(r) * stride;
        Ahead ahead;
        if (r + 128 <= last) ahead = expect(m, r + 64);
        else if (next.matrix && next.row + 64 <= next.matrix->rows) ahead = expect(*next.matrix, next.row);
        tile_rows<4>(codes, (const uint16_t*)m.scales + size_t(r) * groups, (const uint16_t*)m.biases + size_t(r) * groups,
                     m.cols, records, tokens, ws.acc, ws.wide, ahead);
        for (int t = 0; t < tokens; ++t) memcpy(y[t] + r, ws.acc + t * 64, 64 * sizeof(float));
    }
    for (; r < last; r += 16) {
        const int n = last - r < 16 ? int(last - r) : 16;
        const uint8_t* codes = m.weight + size_t(r) * stride;
        const uint16_t *s = (const uint16_t*)m.scales + size_t(r) * groups, *b = (const uint16_t*)m.biases + size_t(r) * groups;
        if (n < 16) {
            copy_tail(m, r, n, ws);
            codes = ws.codes;
            s = ws.scales;
            b = ws.biases;
        }
        Ahead none;
        tile_rows<1>(codes, s, b, m.cols, records, tokens, ws.acc, ws.narrow, none);
        for (int t = 0; t < tokens; ++t) memcpy(y[t] + r, ws.acc + t * 16, size_t(n) * sizeof(float));
    }
}

void rows_nibbles(const Matrix& m, const uint8_t* const* records, int64_t tokens, float* const* y, int64_t first,
                  int64_t last, Next next, Workspace& ws) {
    switch (tokens) {
        case 0: return;
        case 1: return stream_rows<1>(m, records, y, first, last, next, ws);
        case 2: return stream_rows<2>(m, records, y, first, last, next, ws);
        case 3: return stream_rows<3>(m, records, y, first, last, next, ws);
        case 4: return stream_rows<4>(m, records, y, first, last, next, ws);
    }
    multiply_rows(m, records, int(tokens), y, first, last, next, ws);
}

}  // namespace
