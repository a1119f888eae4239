// AVX2 with VNNI in 256 bits: Alder Lake and Zen 5 onwards.
#include "../kernels.h"

#if defined(__AVXVNNI__)
#include "impl.h"
#include "affine4_avx2.h"
#include "affine8_avx2.h"
#include "layouts.h"
#include "table.h"

namespace moeflux {

const Kernels* avx_vnni_kernels() {
    static const Kernels table = make_table("avx_vnni");
    return &table;
}

}  // namespace moeflux
#else
namespace moeflux {
const Kernels* avx_vnni_kernels() { return nullptr; }
}  // namespace moeflux
#endif
