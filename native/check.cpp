#include "check.h"

#include "error.h"

namespace moeflux {

namespace {

std::string shown(int64_t n) { return std::to_string(n); }

}  // namespace

void check_matrix(const Matrix& m, const std::string& where) {
    require_format(m.rows >= 1 && m.rows <= kMaxRows, "has " + shown(m.rows) + " rows; kernels take 1 to " + shown(kMaxRows), where);
    require_format(m.cols >= 1 && m.cols <= kMaxCols, "has " + shown(m.cols) + " columns; kernels take 1 to " + shown(kMaxCols), where);
    if (m.codec == Codec::fp8)
        require_format(m.block >= 1 && m.block <= kMaxCols, "has blocks of " + shown(m.block) + "; kernels take 1 to " + shown(kMaxCols), where);
    if (m.codec != Codec::affine) return;
    const bool bits = (m.bits >= 2 && m.bits <= 6) || m.bits == 8, group = m.group == 32 || m.group == 64 || m.group == 128;
    require_format(bits, "has " + shown(m.bits) + " bits; kernels take 2, 3, 4, 5, 6 and 8", where);
    require_format(group, "has groups of " + shown(m.group) + "; kernels take 32, 64 and 128", where);
    require_format(m.cols % m.group == 0, "has " + shown(m.cols) + " columns, not whole groups of " + shown(m.group), where);
}

int64_t scale_count(const Matrix& m) {
    if (m.codec == Codec::affine) return m.rows * (m.cols / m.group);
    if (m.codec == Codec::fp8) return ((m.rows + m.block - 1) / m.block) * ((m.cols + m.block - 1) / m.block);
    return 0;
}

}  // namespace moeflux
