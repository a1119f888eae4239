// Layout, quantisation and matrix rows for instruction sets with 4-bit kernels of their own (affine4_*.h, included before).
#pragma once

namespace {

Layout choose_layout(const Matrix& m) {
    if (m.codec != Codec::affine || m.cols > kMaxCols) return Layout::floats;
    return m.bits == 4 && m.group == 64 && m.dtype == Dtype::bf16 ? Layout::nibbles : Layout::natural;
}

void quantize(const float* x, int64_t cols, int group, Layout layout, uint8_t* record) {
    if (layout == Layout::nibbles) quantize_nibbles(x, cols, record);
    else quantize_natural(x, cols, group, record);
}

void rows(const Matrix& m, Layout layout, const uint8_t* const* records, int64_t tokens, float* const* y, int64_t first,
          int64_t last, Next next, uint8_t* work) {
    if (layout == Layout::nibbles) rows_nibbles(m, records, tokens, y, first, last, next, *(Workspace*)work);
    else if (layout == Layout::natural && m.bits == 8 && m.group == 64 && m.dtype == Dtype::bf16)
        rows_bytes(m, records, tokens, y, first, last, work);
    else if (layout == Layout::natural) rows_natural(m, records, tokens, y, first, last, work);
    else rows_floats(m, records, tokens, y, first, last, work);
}

size_t workspace_bytes() { return sizeof(Workspace) > size_t(kMaxCols) * 16 ? sizeof(Workspace) : size_t(kMaxCols) * 16; }

}  // namespace
