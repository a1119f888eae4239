// AVX2 with FMA and F16C.
#include "../kernels.h"

#if defined(__AVX2__)
#include "impl.h"
#include "portable.h"
#include "table.h"

namespace moeflux {

const Kernels* avx2_kernels() {
    static const Kernels table = make_table("avx2");
    return &table;
}

}  // namespace moeflux
#else
namespace moeflux {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace moeflux
#endif
