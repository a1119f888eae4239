// What this processor can do. No Python here; bindings.cpp is the only file that knows it.
#pragma once

#include <string_view>

namespace moeflux {

// The best instruction set that kernels are written for: "avx512_vnni", "avx2" or "generic".
std::string_view instruction_set();

}  // namespace moeflux
