// Choosing among many weights: the nucleus (the smallest set of the largest weights that holds a given share of all), and a
// draw.
#pragma once

#include "kernels.h"

namespace moeflux {

struct Nucleus {
    float bound;    // the smallest weight in it
    int64_t count;  // of weights in it; where weights equal the bound, perhaps not all of them
};

// Weights are not negative and at least one is not 0; share from 0 to below 1. `pool`: scratch of n floats.
Nucleus find_nucleus(const Kernels&, const float* weights, int64_t n, double share, float* pool);

// Where a point from 0 to below 1 falls when the weights from `bound` on are laid along it in order: all of them, or if `count`
// is not negative that many, where the last of those that equal the bound are left out (and set to 0).
int64_t draw_weight(const Kernels&, float* weights, int64_t n, float bound, int64_t count, double point);

}  // namespace moeflux
