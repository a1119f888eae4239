#include "experts.h"

#include <algorithm>
#include <limits>

#include "../check.h"
#include "../error.h"
#include "layout.h"

namespace moeflux {

namespace {

constexpr int64_t kMaxExperts = 32767;  // of a layer: ids are recorded in 16 bits

struct Named {
    const ExpertLayer& layer;
    std::string name;  // "layer 3, gate"
};

void check_part(const Named& of, const char* what, const Part& part, int64_t bytes) {
    const auto& components = of.layer.components;
    require_format(part.component >= 0 && size_t(part.component) < components.size(), std::string("has no ") + what, of.name);
    const int64_t there = components[size_t(part.component)].bytes;
    require_format(part.offset >= 0 && part.offset <= there - bytes,
                   std::string(what) + " needs " + std::to_string(bytes) + " bytes from " + std::to_string(part.offset) + " on, its component has " +
                       std::to_string(there),
                   of.name);
}

void check_parts(const Named& of, const ExpertMatrix& m) {
    const Matrix& s = m.shape;
    check_matrix(s, of.name);
    check_part(of, "weight", m.weight, s.rows * int64_t(row_bytes(s)));
    const int64_t scales = scale_count(s) * (s.dtype == Dtype::f32 ? 4 : 2);
    if (s.codec != Codec::plain) check_part(of, "scales", m.scales, scales);
    if (s.codec == Codec::affine) check_part(of, "biases", m.biases, scales);
}

void check_component(const ExpertLayer& layer, const Component& component, const std::string& where, int n_files) {
    const std::string name = where + ", " + component.projection + "." + component.part;
    require_format(component.bytes > 0, "has " + std::to_string(component.bytes) + " bytes", name);
    require_format(int64_t(component.extents.size()) == layer.n_experts,
                   std::to_string(component.extents.size()) + " extents for " + std::to_string(layer.n_experts) + " experts", name);
    for (const Extent& extent : component.extents)
        require_format(extent.length == component.bytes && extent.offset >= 0 &&
                           extent.offset <= std::numeric_limits<int64_t>::max() - 2 * kPage - extent.length && extent.file >= 0 &&
                           extent.file < n_files,
                       "an extent of " + std::to_string(extent.length) + " bytes at " + std::to_string(extent.offset) + " of file " +
                           std::to_string(extent.file) + "; there are " + std::to_string(n_files) + " files",
                       name);
}

void check_fit(const ExpertLayer& layer, const std::string& where) {
    const Matrix &gate = layer.gate.shape, &up = layer.up.shape, &down = layer.down.shape;
    const auto shape = [](const Matrix& m) { return "[" + std::to_string(m.rows) + ", " + std::to_string(m.cols) + "]"; };
    require_format(up.rows == gate.rows && up.cols == gate.cols && down.rows == gate.cols && down.cols == gate.rows,
                   "gate " + shape(gate) + ", up " + shape(up) + " and down " + shape(down) + " do not fit together", where);
}

}  // namespace

void check_layer(const ExpertLayer& layer, int number, int n_files) {
    if (layer.n_experts == 0) return;
    const std::string where = "layer " + std::to_string(number);
    const size_t n = layer.components.size();
    require_format(layer.n_experts > 0 && layer.n_experts <= kMaxExperts,
                   std::to_string(layer.n_experts) + " experts; at most " + std::to_string(kMaxExperts) + " are supported", where);
    require_format(n >= 1 && n <= 9, "an expert has " + std::to_string(n) + " components, not one to nine", where);
    require_format(std::any_of(layer.components.begin(), layer.components.end(), [](const Component& c) { return !c.kept; }),
                   "every component of an expert is kept in memory, none is left for a slot", where);
    for (const Component& component : layer.components) check_component(layer, component, where, n_files);
    check_parts({layer, where + ", gate"}, layer.gate);
    check_parts({layer, where + ", up"}, layer.up);
    check_parts({layer, where + ", down"}, layer.down);
    check_fit(layer, where);
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
