// The routed experts of one layer as the store sees them: components at extents, and how three matrices look into them.
#pragma once

#include <string>
#include <vector>

#include "../types.h"
#include "extent.h"
#include "finite.h"

namespace moeflux {

struct Component {
    std::string projection, part;  // "gate", "scales": for errors
    Scalar type = Scalar::integer;
    int64_t bytes = 0;
    std::vector<Extent> extents;  // one per expert
    bool kept = false;            // stays in memory, outside slots, once it was read
};

// Where an array of a matrix begins: in which component, and how far into it.
struct Part {
    int component = -1;
    int64_t offset = 0;
};

struct ExpertMatrix {
    Matrix shape;  // without pointers
    Part weight, scales, biases;
};

struct ExpertLayer {
    int64_t n_experts = 0;  // 0: the layer has none
    std::vector<Component> components;
    ExpertMatrix gate, up, down;
};

// Throws Error of kind `format` where extents and components disagree, a matrix reaches past its component or is larger than kernels
// take, or the three matrices do not fit together. `number`: of the layer, to be told.
void check_layer(const ExpertLayer& layer, int number, int n_files);

// The matrix with its pointers, from the first byte of each component.
Matrix look_into(const ExpertMatrix& matrix, const uint8_t* const* components);

}  // namespace moeflux
