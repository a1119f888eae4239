// The one file that knows both Python and the native library. Arrays come in checked for type and layout by their
// signatures; sizes are checked here, so that no wrong call from Python can reach past the end of an array.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <unordered_map>

#include "cpu.h"
#include "layer.h"

namespace nb = nanobind;
using namespace moeflux;

namespace {

using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;
using OutIds = nb::ndarray<int64_t, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Any = nb::ndarray<nb::c_contig, nb::device::cpu>;

void require(bool fits, const char* what) {
    if (!fits) throw std::invalid_argument(what);
}

template <class A>
void require_size(const A& array, int64_t size, const char* what) {
    if (int64_t(array.size()) != size)
        throw std::invalid_argument(std::string(what) + " has " + std::to_string(array.size()) + " elements, needs " +
                                    std::to_string(size));
}

Dtype dtype_of(std::string_view name) {
    if (name == "F32") return Dtype::f32;
    if (name == "BF16") return Dtype::bf16;
    if (name == "F16") return Dtype::f16;
    throw std::invalid_argument("dtype must be F32, BF16 or F16");
}

size_t dtype_bytes(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// A matrix and the arrays that it looks into.
struct PyMatrix {
    Matrix m;
    Bytes weight, scales, biases;
};

PyMatrix make_plain(int64_t rows, int64_t cols, std::string_view dtype, Bytes weight) {
    PyMatrix p;
    p.m.rows = rows;
    p.m.cols = cols;
    p.m.dtype = dtype_of(dtype);
    p.m.weight = weight.data();
    p.weight = weight;
    require(cols <= kMaxCols, "more than 32768 columns");
    require_size(weight, rows * int64_t(row_bytes(p.m)), "weight");
    return p;
}

PyMatrix make_affine(int64_t rows, int64_t cols, int bits, int group, std::string_view dtype, Bytes weight, Bytes scales,
                     Bytes biases) {
    require(bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8, "bits");
    require(group == 32 || group == 64 || group == 128, "group");
    require(cols % group == 0 && cols <= kMaxCols, "columns");
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
    const int64_t per_group = rows * (cols / group) * int64_t(dtype_bytes(p.m.dtype));
    require_size(weight, rows * int64_t(row_bytes(p.m)), "weight");
    require_size(scales, per_group, "scales");
    require_size(biases, per_group, "biases");
    return p;
}

PyMatrix make_fp8(int64_t rows, int64_t cols, int block, std::string_view dtype, Bytes weight, Bytes scales) {
    require(block > 0 && cols <= kMaxCols, "block");
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
    const int64_t blocks = ((rows + block - 1) / block) * ((cols + block - 1) / block);
    require_size(weight, rows * cols, "weight");
    require_size(scales, blocks * int64_t(dtype_bytes(p.m.dtype)), "scales");
    return p;
}

struct PyHeads {
    HeadMatrix w;
    PyMatrix matrix;
};

PyHeads make_heads(const PyMatrix& matrix, int64_t heads, int64_t first, int64_t rows, bool transposed) {
    require(heads > 0 && matrix.m.rows % heads == 0, "heads");
    const int64_t stride = matrix.m.rows / heads;
    require(first >= 0 && rows > 0 && first + rows <= stride, "rows of a head");
    return {{matrix.m, heads, stride, first, rows, transposed}, matrix};
}

// The experts of one layer that are in memory, by number. Filled as they arrive; a call uses those its tokens chose.
struct PyBank {
    struct Entry {
        bool filled = false;
        PyMatrix gate, up, down;
    };
    std::vector<Entry> entries;

    void put(int64_t expert, const PyMatrix& gate, const PyMatrix& up, const PyMatrix& down) {
        require(expert >= 0 && expert < int64_t(entries.size()), "expert");
        require(up.m.cols == gate.m.cols && up.m.rows == gate.m.rows && down.m.cols == gate.m.rows && down.m.rows == gate.m.cols,
                "gate, up and down do not fit together");
        for (const Entry& other : entries)
            if (other.filled) {
                require(other.gate.m.rows == gate.m.rows && other.gate.m.cols == gate.m.cols, "experts differ in size");
                require(same_codec(other.gate.m, gate.m) && same_codec(other.up.m, up.m) && same_codec(other.down.m, down.m),
                        "experts differ in codec");
                break;
            }
        entries[size_t(expert)] = {true, gate, up, down};
    }

    static bool same_codec(const Matrix& a, const Matrix& b) {
        return a.codec == b.codec && a.dtype == b.dtype && a.bits == b.bits && a.group == b.group && a.block == b.block;
    }

    // The chosen experts in ascending order, or of those only some.
    std::vector<Expert> chosen(const int64_t* ids, size_t n, int64_t hidden) const {
        std::vector<char> wanted(entries.size());
        for (size_t i = 0; i < n; ++i) {
            require(ids[i] >= 0 && size_t(ids[i]) < entries.size(), "expert id");
            wanted[size_t(ids[i])] = 1;
        }
        std::vector<Expert> ready;
        for (size_t e = 0; e < entries.size(); ++e) {
            if (!wanted[e]) continue;
            const Entry& entry = entries[e];
            require(entry.filled, "an expert that was chosen is not in the bank");
            require(entry.gate.m.cols == hidden, "x has the wrong width");
            ready.push_back({int64_t(e), &entry.gate.m, &entry.up.m, &entry.down.m});
        }
        return ready;
    }
};

// A layer and what it looks into. Names are the roles of moeflux/models/parts.py.
struct PyLayer {
    Layer layer;
    std::vector<PyMatrix> matrices;
    std::vector<Floats> vectors;

    void set_matrix(const std::string& role, const PyMatrix& m) {
        static const std::unordered_map<std::string, Matrix Layer::*> places = {
            {"q_proj", &Layer::q}, {"k_proj", &Layer::k}, {"v_proj", &Layer::v}, {"o_proj", &Layer::o},
            {"q_a_proj", &Layer::q_a}, {"q_b_proj", &Layer::q_b}, {"kv_a_proj", &Layer::kv_a},
            {"in_proj_qkv", &Layer::qkv}, {"in_proj_z", &Layer::z}, {"in_proj_b", &Layer::b}, {"in_proj_a", &Layer::a},
            {"in_proj_qkvz", &Layer::qkvz}, {"in_proj_ba", &Layer::ba}, {"out_proj", &Layer::out},
            {"router", &Layer::router}, {"shared_gate_proj", &Layer::shared_gate_proj},
            {"shared_up_proj", &Layer::shared_up_proj}, {"shared_down_proj", &Layer::shared_down_proj},
            {"shared_gate", &Layer::shared_gate}, {"gate_proj", &Layer::gate_proj}, {"up_proj", &Layer::up_proj},
            {"down_proj", &Layer::down_proj}};
        layer.*places.at(role) = m.m;
        matrices.push_back(m);
    }
    void set_vector(const std::string& role, Floats v) {
        static const std::unordered_map<std::string, const float * Layer::*> places = {
            {"mixer_norm", &Layer::mixer_norm}, {"ffn_norm", &Layer::ffn_norm}, {"q_norm", &Layer::q_norm},
            {"k_norm", &Layer::k_norm}, {"q_a_norm", &Layer::q_a_norm}, {"kv_a_norm", &Layer::kv_a_norm},
            {"conv1d", &Layer::conv}, {"A_log", &Layer::a_log}, {"dt_bias", &Layer::dt_bias}, {"norm", &Layer::norm},
            {"router_bias", &Layer::router_bias}};
        layer.*places.at(role) = v.data();
        vectors.push_back(v);
    }
    void set_heads(const std::string& role, const PyHeads& h) {
        (role == "embed_q" ? layer.embed_q : layer.unembed_out) = h.w;
        matrices.push_back(h.matrix);
    }
};

// (start, stop, position, first, second) per sequence, checked against what the layer's mixer needs.
std::vector<LayerSpan> layer_spans(const Layer& l, nb::list list, int64_t tokens) {
    std::vector<LayerSpan> spans;
    spans.reserve(list.size());
    int64_t at = 0;
    for (nb::handle item : list) {
        nb::tuple t = nb::cast<nb::tuple>(item);
        Any first = nb::cast<Any>(t[3]), second = nb::cast<Any>(t[4]);
        const LayerSpan s = {nb::cast<int64_t>(t[0]),
                             nb::cast<int64_t>(t[1]),
                             nb::cast<int64_t>(t[2]),
                             static_cast<uint8_t*>(first.data()),
                             static_cast<uint8_t*>(second.data()),
                             first.itemsize() == 4 ? Dtype::f32 : Dtype::bf16};
        require(s.start == at && s.stop > at && s.position >= 0, "spans do not follow each other");
        require(first.itemsize() == second.itemsize() && (first.itemsize() == 4 || first.itemsize() == 2), "state dtype");
        const int64_t rows = s.position + s.stop - s.start;
        int64_t n_first = 0, n_second = 0;
        switch (l.mixer) {
            case Mixer::attention: n_first = n_second = rows * l.shape.groups * l.shape.dim; break;
            case Mixer::latent: n_first = n_second = rows * l.kv_a.rows; break;
            case Mixer::delta:
                require(first.itemsize() == 4, "state dtype");
                n_first = (l.delta.width - 1) * l.delta.channels();
                n_second = l.delta.heads * l.delta.key_dim * l.delta.value_dim;
        }
        require(int64_t(first.size()) >= n_first && int64_t(second.size()) >= n_second, "state is too short");
        at = s.stop;
        spans.push_back(s);
    }
    require(at == tokens, "spans do not cover the tokens");
    return spans;
}

const Kernels* pick(const std::string& isa) {
    const std::string name = isa == "auto" ? std::string(instruction_set()) : isa;
    const Kernels* k = nullptr;
    if (name == "generic") k = generic_kernels();
    if (name == "avx2") k = avx2_kernels();
    if (name == "avx512_vnni") k = avx512_vnni_kernels();
    if (!k) throw std::invalid_argument("no kernels for instruction set " + name);
    return k;
}

// Rows and state of one sequence as Python gives them: (start, stop, position, keys, values).
std::vector<KvSpan> kv_spans(nb::list list, int64_t tokens, int64_t row) {
    std::vector<KvSpan> spans;
    int64_t at = 0;
    for (nb::handle item : list) {
        nb::tuple t = nb::cast<nb::tuple>(item);
        KvSpan s;
        s.start = nb::cast<int64_t>(t[0]);
        s.stop = nb::cast<int64_t>(t[1]);
        s.position = nb::cast<int64_t>(t[2]);
        Any keys = nb::cast<Any>(t[3]), values = nb::cast<Any>(t[4]);
        s.keys = static_cast<uint8_t*>(keys.data());
        s.values = static_cast<uint8_t*>(values.data());
        s.dtype = keys.itemsize() == 4 ? Dtype::f32 : Dtype::bf16;
        require(s.start == at && s.stop > at && s.position >= 0, "spans do not follow each other");
        require(keys.itemsize() == values.itemsize() && (keys.itemsize() == 4 || keys.itemsize() == 2), "state dtype");
        const int64_t needed = (s.position + s.stop - s.start) * row;
        require(int64_t(keys.size()) >= needed && int64_t(values.size()) >= needed, "state is too short");
        at = s.stop;
        spans.push_back(s);
    }
    require(at == tokens, "spans do not cover the tokens");
    return spans;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native kernels of moeflux.";
    nb::set_leak_warnings(false);  // an engine that is still open when Python ends is no leak
    m.def("instruction_set", &instruction_set, "The best instruction set of this machine that kernels are written for.");

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

    nb::class_<Machine>(m, "Machine", "Threads, scratch and kernels.")
        .def("__init__",
             [](Machine* self, int threads, const std::string& isa, bool exact, bool poison) {
                 require(threads >= 1 && threads <= 1024, "threads");
                 new (self) Machine(threads, pick(isa), exact, poison);
             },
             nb::arg("threads"), nb::arg("isa"), nb::arg("exact"), nb::arg("poison"))
        .def_prop_ro("threads", &Machine::threads)
        .def_prop_ro("seconds", &Machine::seconds)
        .def_prop_ro("scratch_bytes", &Machine::scratch_bytes)
        .def_prop_ro("isa", [](const Machine& self) { return self.kernels().name; })
        .def("linears",
             [](Machine& self, Floats x, nb::tuple matrices, nb::tuple y) {
                 const size_t n = matrices.size();
                 require(n >= 1 && n <= 8 && y.size() == n && x.ndim() == 2, "linears");
                 const int64_t tokens = int64_t(x.shape(0));
                 std::vector<const Matrix*> ms(n);
                 std::vector<float*> ys(n);
                 for (size_t i = 0; i < n; ++i) {
                     ms[i] = &nb::cast<const PyMatrix&>(matrices[i]).m;
                     Out out = nb::cast<Out>(y[i]);
                     require(ms[i]->cols == int64_t(x.shape(1)), "x has the wrong width");
                     require_size(out, tokens * ms[i]->rows, "y");
                     ys[i] = out.data();
                 }
                 nb::gil_scoped_release release;
                 self.linears(x.data(), tokens, ms, ys);
             })
        .def("head_linear",
             [](Machine& self, Floats x, const PyHeads& w, Out y) {
                 const int64_t n_in = w.w.transposed ? w.w.rows : w.w.matrix.cols, n_out = w.w.transposed ? w.w.matrix.cols : w.w.rows;
                 const int64_t tokens = int64_t(x.shape(0));
                 require_size(x, tokens * w.w.heads * n_in, "x");
                 require_size(y, tokens * w.w.heads * n_out, "y");
                 nb::gil_scoped_release release;
                 self.head_linear(x.data(), tokens, w.w, y.data());
             })
        .def("embed",
             [](Machine& self, const PyMatrix& table, Ids ids, Out y) {
                 for (size_t i = 0; i < ids.size(); ++i) require(ids.data()[i] >= 0 && ids.data()[i] < table.m.rows, "token");
                 require_size(y, int64_t(ids.size()) * table.m.cols, "y");
                 nb::gil_scoped_release release;
                 self.embed(table.m, ids.data(), int64_t(ids.size()), y.data());
             })
        .def("rms_norm",
             [](Machine& self, Floats x, Floats weight, float eps, Out y) {
                 const int64_t n = int64_t(weight.size());
                 require(n > 0 && int64_t(x.size()) % n == 0, "x");
                 require_size(y, int64_t(x.size()), "y");
                 nb::gil_scoped_release release;
                 self.rms_norm(x.data(), weight.data(), eps, int64_t(x.size()) / n, n, y.data());
             })
        .def("add_norm",
             [](Machine& self, Floats a, Floats b, Floats weight, float eps, Out sum, Out y) {
                 const int64_t n = int64_t(weight.size()), all = int64_t(a.size());
                 require(n > 0 && all % n == 0, "a");
                 require_size(b, all, "b");
                 require_size(sum, all, "sum");
                 require_size(y, all, "y");
                 nb::gil_scoped_release release;
                 self.add_norm(a.data(), b.data(), weight.data(), eps, all / n, n, sum.data(), y.data());
             })
        .def("mlp",
             [](Machine& self, Floats x, const PyMatrix& gate, const PyMatrix& up, const PyMatrix& down,
                const PyMatrix* output_gate, Out y) {
                 const int64_t tokens = int64_t(x.shape(0));
                 require_size(x, tokens * gate.m.cols, "x");
                 require(up.m.cols == gate.m.cols && up.m.rows == gate.m.rows && down.m.cols == gate.m.rows, "mlp");
                 require(!output_gate || (output_gate->m.rows == 1 && output_gate->m.cols == gate.m.cols), "gate");
                 require_size(y, tokens * down.m.rows, "y");
                 nb::gil_scoped_release release;
                 self.mlp(x.data(), tokens, gate.m, up.m, down.m, output_gate ? &output_gate->m : nullptr, y.data());
             },
             nb::arg("x"), nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("output_gate").none(), nb::arg("y"))
        .def("attention",
             [](Machine& self, Floats q, Floats k, Floats v, Floats q_norm, Floats k_norm, float eps, int64_t heads, int64_t groups,
                int64_t dim, bool gated, const Rotation& rotation, nb::list spans, Out out) {
                 const int64_t tokens = int64_t(q.shape(0));
                 require(heads > 0 && groups > 0 && heads % groups == 0 && int64_t(rotation.frequencies.size()) * 2 <= dim, "shape");
                 require_size(q, tokens * heads * dim * (gated ? 2 : 1), "q");
                 require_size(k, tokens * groups * dim, "k");
                 require_size(v, tokens * groups * dim, "v");
                 require_size(q_norm, dim, "q_norm");
                 require_size(k_norm, dim, "k_norm");
                 require_size(out, tokens * heads * dim, "out");
                 const auto all = kv_spans(spans, tokens, groups * dim);
                 nb::gil_scoped_release release;
                 self.attention(q.data(), k.data(), v.data(), q_norm.data(), k_norm.data(), eps, {heads, groups, dim, gated},
                                rotation, all, out.data());
             })
        .def("latent_attention",
             [](Machine& self, Floats q_latent, Floats q, int64_t nope, Floats kv, Floats norm, float eps, float scale,
                const Rotation& rotation, nb::list spans, Out out) {
                 const int64_t tokens = int64_t(q_latent.shape(0)), heads = int64_t(q_latent.shape(1));
                 const int64_t rank = int64_t(q_latent.shape(2)), rope = int64_t(rotation.frequencies.size()) * 2;
                 require_size(q, tokens * heads * (nope + rope), "q");
                 require_size(kv, tokens * (rank + rope), "kv");
                 require_size(norm, rank, "norm");
                 require_size(out, tokens * heads * rank, "out");
                 const auto all = kv_spans(spans, tokens, rank + rope);
                 nb::gil_scoped_release release;
                 self.latent_attention(q_latent.data(), q.data() + nope, nope + rope, kv.data(), norm.data(), eps, heads, rank,
                                       scale, rotation, all, out.data());
             })
        .def("delta_net",
             [](Machine& self, Floats qkv, Floats z, Floats a, Floats b, Floats conv, Floats a_log, Floats dt_bias, Floats norm,
                float eps, int64_t key_heads, int64_t heads, int64_t key_dim, int64_t value_dim, nb::list spans, Out out) {
                 const int64_t tokens = int64_t(qkv.shape(0));
                 require(key_heads > 0 && heads % key_heads == 0 && conv.ndim() == 2, "shape");
                 const DeltaShape s = {key_heads, heads, key_dim, value_dim, int64_t(conv.shape(1))};
                 require_size(qkv, tokens * s.channels(), "qkv");
                 require_size(z, tokens * heads * value_dim, "z");
                 require_size(a, tokens * heads, "a");
                 require_size(b, tokens * heads, "b");
                 require_size(conv, s.channels() * s.width, "conv");
                 require_size(a_log, heads, "A_log");
                 require_size(dt_bias, heads, "dt_bias");
                 require_size(norm, value_dim, "norm");
                 require_size(out, tokens * heads * value_dim, "out");
                 std::vector<DeltaStateSpan> all;
                 int64_t at = 0;
                 for (nb::handle item : spans) {
                     nb::tuple t = nb::cast<nb::tuple>(item);
                     Out state_conv = nb::cast<Out>(t[2]), delta = nb::cast<Out>(t[3]);
                     const DeltaStateSpan span = {nb::cast<int64_t>(t[0]), nb::cast<int64_t>(t[1]), state_conv.data(), delta.data()};
                     require(span.start == at && span.stop > at, "spans do not follow each other");
                     require_size(state_conv, (s.width - 1) * s.channels(), "conv state");
                     require_size(delta, heads * key_dim * value_dim, "delta state");
                     at = span.stop;
                     all.push_back(span);
                 }
                 require(at == tokens, "spans do not cover the tokens");
                 nb::gil_scoped_release release;
                 self.delta_net(qkv.data(), z.data(), a.data(), b.data(), conv.data(), a_log.data(), dt_bias.data(), norm.data(),
                                eps, s, all, out.data());
             })
        .def("route",
             [](Machine& self, Out logits, nb::object bias, int64_t k, int64_t groups, int64_t top_groups, bool normalize,
                float scale, OutIds ids, Out weights) {
                 const int64_t tokens = int64_t(logits.shape(0)), experts = int64_t(logits.shape(1));
                 require(k >= 1 && k <= experts && groups >= 1 && experts % groups == 0 && top_groups <= groups, "shape");
                 const float* b = nullptr;
                 if (!bias.is_none()) {
                     const Floats values = nb::cast<Floats>(bias);
                     require_size(values, experts, "bias");
                     b = values.data();
                 }
                 require_size(ids, tokens * k, "ids");
                 require_size(weights, tokens * k, "weights");
                 const RouterShape s = {b != nullptr, experts, k, groups, top_groups, normalize, scale};
                 nb::gil_scoped_release release;
                 return self.route(logits.data(), b, tokens, s, ids.data(), weights.data());
             },
             nb::arg("logits"), nb::arg("bias").none(), nb::arg("k"), nb::arg("groups"), nb::arg("top_groups"),
             nb::arg("normalize"), nb::arg("scale"), nb::arg("ids"), nb::arg("weights"))
        .def("experts",
             [](Machine& self, Floats x, Ids ids, Floats weights, const PyBank& bank, Out y) {
                 require(x.ndim() == 2 && ids.ndim() == 2 && x.shape(0) == ids.shape(0), "experts");
                 const int64_t tokens = int64_t(x.shape(0)), hidden = int64_t(x.shape(1)), k = int64_t(ids.shape(1));
                 require_size(weights, tokens * k, "weights");
                 require_size(y, tokens * hidden, "y");
                 const auto ready = bank.chosen(ids.data(), ids.size(), hidden);
                 nb::gil_scoped_release release;
                 self.experts_all(x.data(), tokens, hidden, ids.data(), weights.data(), k, ready, y.data());
             })
        // Some of the chosen experts now, others in a later call, then `combine`: for experts that arrive one by one.
        .def("experts_some",
             [](Machine& self, Floats x, Ids ids, const PyBank& bank, Ids which, Out outputs) {
                 require(x.ndim() == 2 && ids.ndim() == 2 && x.shape(0) == ids.shape(0), "experts");
                 const int64_t tokens = int64_t(x.shape(0)), hidden = int64_t(x.shape(1)), k = int64_t(ids.shape(1));
                 require_size(outputs, tokens * k * hidden, "outputs");
                 const auto ready = bank.chosen(which.data(), which.size(), hidden);
                 nb::gil_scoped_release release;
                 self.experts(x.data(), tokens, hidden, ids.data(), k, ready, outputs.data());
             })
        .def("run_mixer",
             [](Machine& self, const PyLayer& p, Out x, nb::list spans, Out h, OutIds ids, Out weights) {
                 const Layer& l = p.layer;
                 require(x.ndim() == 2 && int64_t(x.shape(1)) == l.hidden, "x");
                 const int64_t tokens = int64_t(x.shape(0));
                 require_size(h, tokens * l.hidden, "h");
                 if (l.moe()) {
                     require_size(ids, tokens * l.routing.k, "ids");
                     require_size(weights, tokens * l.routing.k, "weights");
                 }
                 const auto all = layer_spans(l, spans, tokens);
                 nb::gil_scoped_release release;
                 return run_mixer(self, l, x.data(), tokens, all, h.data(), ids.data(), weights.data());
             })
        .def("run_ffn",
             [](Machine& self, const PyLayer& p, Out x, Floats h, Ids ids, Floats weights, const PyBank* bank) {
                 const Layer& l = p.layer;
                 require(x.ndim() == 2 && int64_t(x.shape(1)) == l.hidden, "x");
                 const int64_t tokens = int64_t(x.shape(0));
                 require_size(h, tokens * l.hidden, "h");
                 std::vector<Expert> ready;
                 if (l.moe()) {
                     require(bank != nullptr, "bank");
                     require_size(ids, tokens * l.routing.k, "ids");
                     require_size(weights, tokens * l.routing.k, "weights");
                     ready = bank->chosen(ids.data(), ids.size(), l.hidden);
                 }
                 nb::gil_scoped_release release;
                 run_ffn(self, l, x.data(), h.data(), tokens, ids.data(), weights.data(), ready);
             },
             nb::arg("layer"), nb::arg("x"), nb::arg("h"), nb::arg("ids"), nb::arg("weights"), nb::arg("bank").none())
        // All layers in one call, for experts that are all in memory. Returns -1, or the layer whose scores are not finite.
        .def("run_layers",
             [](Machine& self, nb::list layers, Out x, nb::list spans, nb::list banks) {
                 const size_t n = layers.size();
                 require(spans.size() == n && banks.size() == n && x.ndim() == 2, "layers");
                 const int64_t tokens = int64_t(x.shape(0)), hidden = int64_t(x.shape(1));
                 struct Step {
                     const Layer* layer;
                     std::vector<LayerSpan> spans;
                     const PyBank* bank;
                 };
                 std::vector<Step> steps;
                 steps.reserve(n);
                 int64_t k = 0;
                 for (size_t i = 0; i < n; ++i) {
                     const Layer& l = nb::cast<const PyLayer&>(layers[i]).layer;
                     require(l.hidden == hidden, "x");
                     const PyBank* bank = banks[i].is_none() ? nullptr : &nb::cast<const PyBank&>(banks[i]);
                     require(!l.moe() || bank, "bank");
                     steps.push_back({&l, layer_spans(l, nb::cast<nb::list>(spans[i]), tokens), bank});
                     k = l.moe() ? std::max(k, l.routing.k) : k;
                 }
                 nb::gil_scoped_release release;
                 std::vector<float> h(size_t(tokens * hidden)), weights(size_t(tokens * k));
                 std::vector<int64_t> ids(size_t(tokens * k));
                 for (size_t i = 0; i < n; ++i) {
                     const Step& s = steps[i];
                     if (!run_mixer(self, *s.layer, x.data(), tokens, s.spans, h.data(), ids.data(), weights.data())) return int64_t(i);
                     const auto ready = s.layer->moe()
                                            ? s.bank->chosen(ids.data(), size_t(tokens * s.layer->routing.k), hidden)
                                            : std::vector<Expert>();
                     run_ffn(self, *s.layer, x.data(), h.data(), tokens, ids.data(), weights.data(), ready);
                 }
                 return int64_t(-1);
             })
        .def("time_read",
             [](Machine& self, Bytes buffer) {
                 nb::gil_scoped_release release;
                 return self.time_read(buffer.data(), buffer.size());
             })
        .def("multiply_rate", &Machine::multiply_rate, nb::call_guard<nb::gil_scoped_release>())
        .def("combine", [](Machine& self, Floats outputs, Floats weights, Out y) {
            require(outputs.ndim() == 3 && weights.ndim() == 2, "combine");
            const int64_t tokens = int64_t(outputs.shape(0)), k = int64_t(outputs.shape(1)), hidden = int64_t(outputs.shape(2));
            require_size(weights, tokens * k, "weights");
            require_size(y, tokens * hidden, "y");
            nb::gil_scoped_release release;
            self.combine(outputs.data(), weights.data(), tokens, k, hidden, y.data());
        });
}
