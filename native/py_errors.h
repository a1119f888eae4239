// Errors for Python, and what ends a native call from outside of it.
#pragma once

#include <nanobind/nanobind.h>

#include "cancel.h"

namespace moeflux {

// Error as the class of moeflux.core.errors of its kind; and CancelFlag.
void bind_errors(nanobind::module_& m);

// Runs the handlers of signals that came: for Listener. Empty in threads where Python never runs them.
std::function<void()> signals();

}  // namespace moeflux
