// What kernels work on. Plain data, no ownership: Python keeps the arrays alive.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace moeflux {

enum class Dtype : int { f32, bf16, f16 };
constexpr int64_t kStateBlock = 256;  // positions in a block of a state, as in moeflux/backends/state.py
constexpr int64_t kMaxCols = 32768;  // of a matrix: a thread unpacks whole rows
constexpr int64_t kMaxRows = int64_t(1) << 31;

enum class Codec : int { plain, affine, fp8 };

// A weight [rows, cols], row-major, coded.
struct Matrix {
    Codec codec = Codec::plain;
    int64_t rows = 0, cols = 0;
    const uint8_t* weight = nullptr;  // values or codes
    const uint8_t* scales = nullptr;  // affine: [rows, cols / group]; fp8: [ceil(rows / block), ceil(cols / block)]
    const uint8_t* biases = nullptr;  // affine
    Dtype dtype = Dtype::f32;         // of the weight (plain) or of scales and biases
    int bits = 0, group = 0;          // affine
    int block = 0;                    // fp8
    int64_t first_row = 0;            // fp8: row of the stored tensor that row 0 is, for its block of scales
};

// Functions here are static: this file is compiled once per instruction set, and a shared one could be the wrong one.
static inline size_t row_bytes(const Matrix& m) {
    if (m.codec == Codec::affine) return size_t(m.cols) * size_t(m.bits) / 8;
    if (m.codec == Codec::fp8) return size_t(m.cols);
    return size_t(m.cols) * (m.dtype == Dtype::f32 ? 4 : 2);
}

// How activations are laid out for integer dot products with a matrix.
enum class Layout : int {
    floats,   // not quantised: the matrix is not affine, or exact mode
    natural,  // int8 in order, per group of the matrix
    nibbles,  // int8, even elements before odd ones: for 4-bit groups of 64
};

// Bytes of one token's record: int8 values, then per group a scale and the sum of the quantised values.
static inline size_t record_bytes(Layout layout, int64_t cols, int group) {
    if (layout == Layout::floats) return size_t(cols) * 4;
    if (layout == Layout::natural) {
        const size_t groups = size_t(cols / group);
        return ((size_t(cols) + 63) / 64 * 64 + groups * 8 + 63) / 64 * 64;
    }
    const size_t pairs = size_t(cols / 64 + 1) / 2;
    return (pairs * (128 + 16) + 63) / 64 * 64;
}

}  // namespace moeflux
