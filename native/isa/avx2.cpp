// AVX2 with FMA and F16C: Haswell and Zen onwards.
#include "../kernels.h"

#if defined(__AVX2__)
#include "impl.h"
#include "affine4_avx2.h"
#include "affine8_avx2.h"
#include "layouts.h"
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
