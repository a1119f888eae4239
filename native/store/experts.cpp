#include "experts.h"

#include <algorithm>
#include <stdexcept>

namespace moeflux {

namespace {

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

void check_part(const ExpertLayer& layer, const Part& part, int64_t bytes) {
    require(part.component >= 0 && size_t(part.component) < layer.components.size(), "a matrix without a component");
    const int64_t there = layer.components[size_t(part.component)].bytes;
    require(part.offset >= 0 && bytes >= 0 && part.offset <= there - bytes, "a matrix reaches past its component");
}

void check_matrix(const ExpertLayer& layer, const ExpertMatrix& m) {
    const Matrix& s = m.shape;
    require(s.rows > 0 && s.cols > 0, "an empty matrix");
    check_part(layer, m.weight, s.rows * int64_t(row_bytes(s)));
    const int64_t each = s.dtype == Dtype::f32 ? 4 : 2;
    if (s.codec == Codec::affine) {
        require(s.group > 0 && s.cols % s.group == 0, "group");
        check_part(layer, m.scales, s.rows * (s.cols / s.group) * each);
        check_part(layer, m.biases, s.rows * (s.cols / s.group) * each);
    } else if (s.codec == Codec::fp8) {
        require(s.block > 0, "block");
        check_part(layer, m.scales, ((s.rows + s.block - 1) / s.block) * ((s.cols + s.block - 1) / s.block) * each);
    }
}

}  // namespace

void check_layer(const ExpertLayer& layer, int n_files) {
    if (layer.n_experts == 0) return;
    require(!layer.components.empty() && layer.components.size() <= 9, "an expert has one to nine components");
    require(std::any_of(layer.components.begin(), layer.components.end(), [](const Component& c) { return !c.kept; }),
            "an expert needs a component that is not kept");
    for (const Component& component : layer.components) {
        require(component.bytes > 0, "an empty component");
        require(int64_t(component.extents.size()) == layer.n_experts, "one extent per expert");
        for (const Extent& extent : component.extents)
            require(extent.length == component.bytes && extent.offset >= 0 && extent.file >= 0 && extent.file < n_files, "extent");
    }
    check_matrix(layer, layer.gate);
    check_matrix(layer, layer.up);
    check_matrix(layer, layer.down);
}

Matrix look_into(const ExpertMatrix& matrix, const uint8_t* const* components) {
    const auto at = [&](const Part& part) { return part.component < 0 ? nullptr : components[part.component] + part.offset; };
    Matrix m = matrix.shape;
    m.weight = at(matrix.weight);
    m.scales = at(matrix.scales);
    m.biases = at(matrix.biases);
    return m;
}

}  // namespace moeflux
