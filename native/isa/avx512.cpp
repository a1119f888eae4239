// AVX-512 with VNNI: Cascade Lake and Zen 4 onwards.
#include "../kernels.h"

#if defined(__AVX512VNNI__)
#include "impl.h"
#include "affine4_avx512.h"
#include "affine8_avx512.h"
#include "layouts.h"
#include "table.h"

namespace moeflux {

const Kernels* avx512_vnni_kernels() {
    static const Kernels table = make_table("avx512_vnni");
    return &table;
}

}  // namespace moeflux
#else
namespace moeflux {
const Kernels* avx512_vnni_kernels() { return nullptr; }
}  // namespace moeflux
#endif
