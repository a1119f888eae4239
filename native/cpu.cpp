#include "cpu.h"

#include "kernels.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

namespace moeflux {

namespace {

#if defined(__x86_64__) || defined(__i386__)
bool has_avx_vnni() {  // a name that compilers' own checks learnt late
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

}  // namespace

std::vector<std::string> instruction_sets() {
    std::vector<std::string> found;
#if defined(__x86_64__) || defined(__i386__)
    // The compiler's own checks include whether the operating system saves the wide registers.
    __builtin_cpu_init();
    if (avx512_vnni_kernels() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        found.push_back("avx512_vnni");
    if (avx2_kernels() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        if (avx_vnni_kernels() && has_avx_vnni()) found.push_back("avx_vnni");
        found.push_back("avx2");
    }
#endif
    found.push_back("generic");
    return found;
}

}  // namespace moeflux
