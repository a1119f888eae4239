#include "py_errors.h"

#include <unistd.h>

#include <nanobind/stl/string.h>

namespace nb = nanobind;

namespace moeflux {

namespace {

nb::object text_or_none(const std::string& text) { return text.empty() ? nb::none() : nb::object(nb::str(text.c_str())); }

nb::object to_python(const Error& e) {
    static constexpr const char* names[] = {"ReadError",      "FormatError", "ClosedError", "BudgetError",
                                            "CancelledError", "StateError",  "InputError",  "OptionError"};
    nb::object type = nb::module_::import_("moeflux.core.errors").attr(names[int(e.kind)]);
    nb::object made = type(e.what(), nb::arg("where") = text_or_none(e.where), nb::arg("hint") = text_or_none(e.hint));
    if (e.error) {  // a failed read keeps its errno
        nb::object cause = nb::borrow(PyExc_OSError)(e.error, e.what());
        PyException_SetCause(made.ptr(), cause.release().ptr());
    }
    return made;
}

void check_signals() {
    nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace

void bind_errors(nb::module_& m) {
    nb::register_exception_translator([](const std::exception_ptr& p, void*) {
        try {
            std::rethrow_exception(p);
        } catch (const Error& e) {
            try {
                const nb::object error = to_python(e);
                PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
            } catch (nb::python_error& other) {  // Python is ending and has no modules left
                other.restore();
            }
        }
    });
    nb::class_<CancelFlag>(m, "CancelFlag", "Ends a run; any thread may set it.")
        .def(nb::init<>())
        .def("set", &CancelFlag::set)
        .def("clear", &CancelFlag::clear)
        .def_prop_ro("is_set", &CancelFlag::is_set);
}

std::function<void()> signals() { return getpid() == gettid() ? check_signals : std::function<void()>(); }

}  // namespace moeflux
