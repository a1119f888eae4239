// Layout, quantisation and matrix rows for instruction sets without a layout of their own.
#pragma once

namespace {

Layout choose_layout(const Matrix& m) {
    return m.codec == Codec::affine && m.cols <= kMaxCols ? Layout::natural : Layout::floats;
}

void quantize(const float* x, int64_t cols, int group, Layout, uint8_t* record) {
    quantize_natural(x, cols, group, record);
}

void rows(const Matrix& m, Layout layout, const uint8_t* const* records, int64_t tokens, float* const* y, int64_t first,
          int64_t last, Next, uint8_t* work) {
    if (layout == Layout::floats) rows_floats(m, records, tokens, y, first, last, work);
    else rows_natural(m, records, tokens, y, first, last, work);
}

size_t workspace_bytes() { return size_t(kMaxCols) * 16; }

}  // namespace
