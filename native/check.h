// Sizes as files and configs say them, against what kernels and their buffers can take. Each is refused by name, with numbers.
#pragma once

#include <string>

#include "types.h"

namespace moeflux {

// Throws Error of kind `format`: codec, bits, group, block, rows and columns.
void check_matrix(const Matrix& m, const std::string& where);

// Numbers in the scales of a matrix that was checked, and as many in its biases; 0: it has none.
int64_t scale_count(const Matrix& m);

}  // namespace moeflux
