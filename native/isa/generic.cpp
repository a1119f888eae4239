// Any processor.
#include "impl.h"
#include "portable.h"
#include "table.h"

namespace moeflux {

const Kernels* generic_kernels() {
    static const Kernels table = make_table("generic");
    return &table;
}

}  // namespace moeflux
