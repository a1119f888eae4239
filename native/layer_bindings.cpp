// Whole layers for Python: one at a time, or all of them with experts from banks or from a store.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "py_types.h"
#include "stream.h"

namespace moeflux {

namespace {

// Layers and the spans of the batch in each of them.
struct Forward {
    std::vector<Span> spans;
    std::vector<Step> steps;

    Forward(nb::list layers, nb::list per_layer, int64_t tokens, int64_t hidden) {
        std::vector<size_t> ends;
        for (size_t i = 0; i < layers.size(); ++i) {
            const Layer& l = nb::cast<const PyLayer&>(layers[i]).layer;
            require(l.hidden == hidden, "x");
            read_spans(nb::cast<nb::list>(per_layer[i]), tokens, state_shape(l), spans);
            ends.push_back(spans.size());
            steps.push_back({&l, {}});
        }
        for (size_t i = 0; i < steps.size(); ++i) {
            const size_t first = i ? ends[i - 1] : 0;
            steps[i].spans = Spans(spans.data() + first, ends[i] - first);
        }
    }
};

// Ctrl-C in the middle of a prompt.
void check_signals() {
    nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace

void bind_layers(nb::module_& m, nb::class_<Machine>& machine) {
    // Returns -1, or the layer whose scores are not finite.
    machine.def("run_layers", [](Machine& self, nb::list layers, Out x, nb::list spans, Stream& stream) {
            require(spans.size() == layers.size() && x.ndim() == 2, "layers");
            const Forward forward(layers, spans, int64_t(x.shape(0)), int64_t(x.shape(1)));
            nb::gil_scoped_release release;
            const Stream::Run run(stream, forward.steps);
            return run_layers(self, forward.steps, x.data(), int64_t(x.shape(0)), stream);
        });
    nb::class_<Stream>(m, "Stream", "Experts for forwards from a store, with hints for the layers that follow.")
        .def("__init__",
             [](Stream* self, std::shared_ptr<Store> store, Machine& on, bool previous, bool lookahead, int most) {
                 new (self) Stream(std::move(store), on, {&check_signals, previous, lookahead, most});
             },
             nb::arg("store"), nb::arg("machine"), nb::arg("previous"), nb::arg("lookahead"), nb::arg("most"),
             nb::keep_alive<1, 3>())
        .def("record", &Stream::record)
        .def_prop_ro("routed", [](const Stream& self) {
            return nb::bytes(self.routed().data(), self.routed().size() * sizeof(int16_t));
        })
        .def_prop_ro("width", [](const Stream& s) { return s.reach().width(); })
        .def_prop_ro("depth", [](const Stream& s) { return s.reach().depth(); })
        .def_prop_ro("guessed", &Stream::guessed)
        .def_prop_ro("asked", &Stream::asked)
        .def_prop_ro("foreseen", &Stream::foreseen);
}

}  // namespace moeflux
