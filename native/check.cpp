#include "check.h"

#include "error.h"

namespace moeflux {

namespace {

std::string shown(int64_t n) { return std::to_string(n); }

}  // namespace

void check_matrix(const Matrix& m, const std::string& where) {
    const auto within = [&](const std::string& what, int64_t n, int64_t most) {
        require_format(n >= 1 && n <= most, "has " + what + "; kernels take 1 to " + shown(most), where);
    };
    within(shown(m.rows) + " rows", m.rows, kMaxRows);
    within(shown(m.cols) + " columns", m.cols, kMaxCols);
    if (m.codec == Codec::fp8) within("blocks of " + shown(m.block), m.block, kMaxCols);
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
