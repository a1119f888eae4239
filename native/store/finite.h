// Whether stored numbers are all finite, from their exponent bits alone: the verdicts of moeflux.formats.dtypes.all_finite.
#pragma once

#include <cstdint>
#include <string_view>

namespace moeflux {

enum class Scalar : int { integer, f32, bf16, f16, f8 };  // f8: e4m3, which has NaN and no infinity

// From the names that safetensors gives types. Throws Error of kind `format`.
Scalar scalar_of(std::string_view name);
int scalar_bytes(Scalar type);

// `p` need not be aligned.
bool all_finite(Scalar type, const uint8_t* p, int64_t bytes);

}  // namespace moeflux
