// The one file that knows both Python and the native library.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include "cpu.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    m.doc() = "Native kernels of moeflux.";
    m.def("instruction_set", &moeflux::instruction_set,
          "The best instruction set of this machine that kernels are written for.");
}
