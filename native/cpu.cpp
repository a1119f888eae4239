#include "cpu.h"

namespace moeflux {

std::string_view instruction_set() {
#if defined(__x86_64__) || defined(__i386__)
    // The compiler's own checks include whether the operating system saves the wide registers.
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
        return "avx512_vnni";
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return "avx2";
#endif
    return "generic";
}

}  // namespace moeflux
