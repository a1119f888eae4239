// The store for Python.
#pragma once

#include <nanobind/nanobind.h>

namespace moeflux {

void bind_store(nanobind::module_& m);

}  // namespace moeflux
