// The predictor for Python: for a backend that drives its layers there, and for tests.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "predict/predictor.h"
#include "py_types.h"

namespace moeflux {

namespace {

using Found = std::vector<std::tuple<std::string, int64_t, int64_t, bool>>;  // where, layer, width, soon

Found found(std::span<const Look> looks) {
    static constexpr const char* kNames[] = {"router", "previous", "prompt"};
    Found all;
    for (const Look& look : looks) all.emplace_back(kNames[look.at], int64_t(look.layer), look.width, look.soon);
    return all;
}

std::vector<int64_t> copied(std::span<const int64_t> ids) { return {ids.begin(), ids.end()}; }

}  // namespace

void bind_predictor(nb::module_& m) {
    nb::class_<Predictor>(m, "Predictor", "What later layers will likely ask for: where to look, and what to hint.")
        .def("__init__",
             [](Predictor* self, int64_t n_layers, bool previous, bool lookahead, int most) {
                 require(n_layers >= 1 && most >= 1, "layers and hints");
                 new (self) Predictor(size_t(n_layers), {previous, lookahead, most});
             },
             nb::arg("n_layers"), nb::arg("previous"), nb::arg("lookahead"), nb::arg("most"))
        .def("start", &Predictor::start, nb::arg("sweep"), nb::arg("missing"), nb::arg("crowded"))
        .def("finish", &Predictor::finish, nb::arg("issued"), nb::arg("useful"), nb::arg("idle"), nb::arg("stalled"))
        .def("before", [](Predictor& self, int64_t layer) { return found(self.before(size_t(layer))); })
        .def("meanwhile", [](Predictor& self, int64_t layer) { return found(self.meanwhile(size_t(layer))); })
        .def("guess",
             [](Predictor& self, int64_t layer, Ids ids) {
                 require(layer >= 0 && size_t(layer) < self.n_layers(), "layer");
                 self.guesses(size_t(layer)).assign(ids.data(), ids.data() + ids.size());
             })
        .def("previous",
             [](Predictor& self, int64_t layer, int64_t k) {
                 require(layer >= 0 && size_t(layer) < self.n_layers() && k >= 1, "layer");
                 return copied(self.previous(size_t(layer), k));
             })
        .def("ahead", [](Predictor& self, int64_t layer) { return copied(self.ahead(size_t(layer))); })
        .def("chose",
             [](Predictor& self, int64_t layer, Ids ids, Ids decoding) {
                 require(layer >= 0 && size_t(layer) < self.n_layers() && ids.ndim() == 2, "layer");
                 for (size_t i = 0; i < decoding.size(); ++i)
                     require(decoding.data()[i] >= 0 && decoding.data()[i] < int64_t(ids.shape(0)), "rows");
                 self.chose(size_t(layer), ids.data(), int64_t(ids.size()), {decoding.data(), decoding.size()}, int64_t(ids.shape(1)));
             })
        .def_prop_ro("width", [](const Predictor& self) { return self.reach().width(); })
        .def_prop_ro("depth", [](const Predictor& self) { return self.reach().depth(); })
        .def_prop_ro("guessed", &Predictor::guessed)
        .def_prop_ro("asked", &Predictor::asked)
        .def_prop_ro("foreseen", &Predictor::foreseen);
}

}  // namespace moeflux
