// What this processor can do. No Python here; bindings.cpp is the only file that knows it.
#pragma once

#include <string>
#include <vector>

namespace moeflux {

// Those that kernels are written for and that run here, the best first: "avx512_vnni", "avx_vnni", "avx2", "generic".
std::vector<std::string> instruction_sets();

}  // namespace moeflux
