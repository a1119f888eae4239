// The module: weights and memory as Python sees them. Arrays come in checked for type and layout by their signatures; sizes
// are checked in these binding files, so that no wrong call from Python can reach past the end of an array.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "check.h"
#include "cpu.h"
#include "nucleus.h"
#include "py_errors.h"
#include "py_types.h"
#include "store_bindings.h"

using namespace moeflux;

namespace {

PyMatrix make_plain(int64_t rows, int64_t cols, std::string_view dtype, Bytes weight) {
    PyMatrix p;
    p.m.rows = rows;
    p.m.cols = cols;
    p.m.dtype = dtype_of(dtype);
    p.m.weight = weight.data();
    p.weight = weight;
    check_matrix(p.m, {});
    require_size(weight, rows * int64_t(row_bytes(p.m)), "weight");
    return p;
}

PyMatrix make_affine(int64_t rows, int64_t cols, int bits, int group, std::string_view dtype, Bytes weight, Bytes scales,
                     Bytes biases) {
    PyMatrix p;
    p.m.codec = Codec::affine;
    p.m.rows = rows;
    p.m.cols = cols;
    p.m.bits = bits;
    p.m.group = group;
    p.m.dtype = dtype_of(dtype);
    p.m.weight = weight.data();
    p.m.scales = scales.data();
    p.m.biases = biases.data();
    p.weight = weight;
    p.scales = scales;
    p.biases = biases;
    check_matrix(p.m, {});
    const int64_t per_group = scale_count(p.m) * int64_t(dtype_bytes(p.m.dtype));
    require_size(weight, rows * int64_t(row_bytes(p.m)), "weight");
    require_size(scales, per_group, "scales");
    require_size(biases, per_group, "biases");
    return p;
}

PyMatrix make_fp8(int64_t rows, int64_t cols, int block, std::string_view dtype, Bytes weight, Bytes scales) {
    PyMatrix p;
    p.m.codec = Codec::fp8;
    p.m.rows = rows;
    p.m.cols = cols;
    p.m.block = block;
    p.m.dtype = dtype_of(dtype);
    p.m.weight = weight.data();
    p.m.scales = scales.data();
    p.weight = weight;
    p.scales = scales;
    check_matrix(p.m, {});
    require_size(weight, rows * cols, "weight");
    require_size(scales, scale_count(p.m) * int64_t(dtype_bytes(p.m.dtype)), "scales");
    return p;
}

PyHeads make_heads(const PyMatrix& matrix, int64_t heads, int64_t first, int64_t rows, bool transposed) {
    require_format(heads > 0 && matrix.m.rows % heads == 0,
                   std::to_string(matrix.m.rows) + " rows are not " + std::to_string(heads) + " equal heads");
    const int64_t stride = matrix.m.rows / heads;
    require_format(first >= 0 && rows > 0 && first <= stride && rows <= stride - first,
                   "a head has " + std::to_string(stride) + " rows, " + std::to_string(rows) + " from " +
                       std::to_string(first) + " on are wanted");
    return {{matrix.m, heads, stride, first, rows, transposed}, matrix};
}

const Kernels* pick(const std::string& isa) {
    const std::string name = isa == "auto" ? instruction_sets().front() : isa;
    const Kernels* k = nullptr;
    if (name == "generic") k = generic_kernels();
    if (name == "avx2") k = avx2_kernels();
    if (name == "avx_vnni") k = avx_vnni_kernels();
    if (name == "avx512_vnni") k = avx512_vnni_kernels();
    if (!k) throw Error(Error::Kind::option, "no kernels for instruction set " + name, "option 'isa'");
    return k;
}

// Weights of all logits relative to the peak.
void weigh(Floats logits, std::optional<Bytes> allowed, float peak, float temperature, Out out, const std::string& isa) {
    require_size(out, int64_t(logits.size()), "weights");
    if (allowed) require_size(*allowed, int64_t(logits.size()), "allowed");
    const Kernels* k = pick(isa);
    const Unlocked unlocked;
    k->weigh(logits.data(), allowed ? allowed->data() : nullptr, int64_t(logits.size()), peak, temperature, out.data());
}

double exp_total(Floats logits, float peak, const std::string& isa) {
    const Kernels* k = pick(isa);
    const Unlocked unlocked;
    return k->exp_total(logits.data(), int64_t(logits.size()), peak);
}

nb::tuple nucleus(Floats weights, double share, const std::string& isa) {
    require(weights.size() > 0, "no weights");
    require(share >= 0 && share < 1, "share");
    const Kernels* k = pick(isa);
    Nucleus found;
    {
        const Unlocked unlocked;
        const std::unique_ptr<float[]> pool(new float[weights.size()]);
        found = find_nucleus(*k, weights.data(), int64_t(weights.size()), share, pool.get());
    }
    return nb::make_tuple(found.bound, found.count);
}

int64_t draw(Out weights, float bound, int64_t count, double point, const std::string& isa) {
    require(weights.size() > 0, "no weights");
    require(point >= 0 && point < 1, "point");
    const Kernels* k = pick(isa);
    const Unlocked unlocked;
    return draw_weight(*k, weights.data(), int64_t(weights.size()), bound, count, point);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native kernels of moeflux.";
    nb::set_leak_warnings(false);  // an engine that is still open when Python ends is no leak
    m.def("instruction_sets", &instruction_sets, "Those of this machine that kernels are written for, the best first.");

    m.def("weigh", &weigh, nb::arg("logits"), nb::arg("allowed").none(), nb::arg("peak"), nb::arg("temperature"), nb::arg("out"),
          nb::arg("isa") = "auto", "e^((logits - peak) / temperature), 0 for what is not allowed.");
    m.def("exp_total", &exp_total, nb::arg("logits"), nb::arg("peak"), nb::arg("isa") = "auto", "The sum of e^(logits - peak).");
    m.def("nucleus", &nucleus, nb::arg("weights"), nb::arg("share"), nb::arg("isa") = "auto",
          "The smallest of the largest weights that together hold this share, and how many they are.");
    m.def("draw", &draw, nb::arg("weights"), nb::arg("bound"), nb::arg("count"), nb::arg("point"), nb::arg("isa") = "auto",
          "Where a point from 0 to below 1 falls among the weights from the bound on; count -1: all of those.");

    nb::class_<Block>(m, "Block", "Memory on huge pages where the kernel gives them.")
        .def(nb::init<size_t>())
        .def("bytes", [](Block& b) { return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(b.data(), {b.size()}); },
             nb::rv_policy::reference_internal);

    nb::class_<PyMatrix>(m, "Matrix", "A coded weight; keeps its arrays alive.")
        .def_prop_ro("rows", [](const PyMatrix& p) { return p.m.rows; })
        .def_prop_ro("cols", [](const PyMatrix& p) { return p.m.cols; });
    m.def("plain_matrix", &make_plain);
    m.def("affine_matrix", &make_affine);
    m.def("fp8_matrix", &make_fp8);

    nb::class_<PyHeads>(m, "Heads", "One matrix per head.").def_prop_ro("n_out", [](const PyHeads& h) {
        return h.w.transposed ? h.w.matrix.cols : h.w.rows;
    });
    m.def("heads", &make_heads, nb::arg("matrix"), nb::arg("heads"), nb::arg("first"), nb::arg("rows"), nb::arg("transposed"));

    nb::class_<PyBank>(m, "Bank", "The experts of one layer that are in memory.")
        .def("__init__", [](PyBank* self, size_t experts) { new (self) PyBank{std::vector<PyBank::Entry>(experts)}; })
        .def("put", &PyBank::put);

    nb::class_<Rotation>(m, "Rotation", "Rotary frequencies.")
        .def("__init__", [](Rotation* r, std::vector<double> frequencies, double scale, bool interleaved) {
            new (r) Rotation{std::move(frequencies), scale, interleaved};
        });

    nb::class_<PyLayer>(m, "Layer", "One layer, built once.")
        .def(nb::init<>())
        .def("matrix", &PyLayer::set_matrix)
        .def("vector", &PyLayer::set_vector)
        .def("heads", &PyLayer::set_heads)
        .def("check", &PyLayer::check, nb::arg("where"))
        .def("common", [](PyLayer& p, int64_t hidden, float eps) {
            p.layer.hidden = hidden;
            p.layer.eps = eps;
        })
        .def("attention", [](PyLayer& p, int64_t heads, int64_t groups, int64_t dim, bool gated, const Rotation& rotation) {
            p.layer.mixer = Mixer::attention;
            p.layer.shape = {heads, groups, dim, gated};
            p.layer.rotation = rotation;
        })
        .def("latent", [](PyLayer& p, int64_t heads, int64_t nope, int64_t rank, float scale, float eps, const Rotation& rotation) {
            p.layer.mixer = Mixer::latent;
            p.layer.heads = heads;
            p.layer.nope = nope;
            p.layer.rank = rank;
            p.layer.scale = scale;
            p.layer.latent_eps = eps;
            p.layer.rotation = rotation;
        })
        .def("delta", [](PyLayer& p, int64_t key_heads, int64_t heads, int64_t key_dim, int64_t value_dim, int64_t width) {
            p.layer.mixer = Mixer::delta;
            p.layer.delta = {key_heads, heads, key_dim, value_dim, width};
        })
        .def("routing", [](PyLayer& p, bool sigmoid, int64_t experts, int64_t k, int64_t groups, int64_t top_groups,
                           bool normalize, float scale) {
            p.layer.routing = {sigmoid, experts, k, groups, top_groups, normalize, scale};
        });

    nb::class_<Machine> machine(m, "Machine", "Threads, scratch and kernels.");
    machine
        .def("__init__",
             [](Machine* self, int threads, const std::string& isa, bool exact, bool poison) {
                 require(threads >= 1 && threads <= 1024, "threads");
                 new (self) Machine(threads, pick(isa), exact, poison);
             },
             nb::arg("threads"), nb::arg("isa"), nb::arg("exact"), nb::arg("poison"))
        .def_prop_ro("threads", &Machine::threads)
        .def_prop_ro("seconds", &Machine::seconds)
        .def_prop_ro("scratch_bytes", &Machine::scratch_bytes)
        .def_prop_ro("isa", [](const Machine& self) { return self.kernels().name; });
    bind_errors(m);
    bind_blocks(machine);
    bind_layers(m, machine);
    bind_store(m);
}
