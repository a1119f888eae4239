// What Python's objects look like on the native side: arrays, checks, and structs that keep alive what they look into.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "error.h"
#include "gil.h"
#include "layer.h"

namespace moeflux {

namespace nb = nanobind;

using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;
using OutIds = nb::ndarray<int64_t, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Addresses = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class A>
void require_size(const A& array, int64_t size, const char* what) {
    require_count(int64_t(array.size()), size, what);
}

inline Dtype dtype_of(std::string_view name) {
    if (name == "F32") return Dtype::f32;
    if (name == "BF16") return Dtype::bf16;
    if (name == "F16") return Dtype::f16;
    throw Error(Error::Kind::format, "no kernels for weights or scales of type " + std::string(name), {}, "F32, BF16 or F16");
}

inline size_t dtype_bytes(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// A matrix and the arrays that it looks into.
struct PyMatrix {
    Matrix m;
    Bytes weight, scales, biases;
};

struct PyHeads {
    HeadMatrix w;
    PyMatrix matrix;
};

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
        std::vector<Expert> ready;
        for (size_t i = 0; i < n; ++i) {
            const int64_t id = ids[i];
            require(id >= 0 && size_t(id) < entries.size(), "expert id");
            const Entry& entry = entries[size_t(id)];
            require(entry.filled, "an expert that was chosen is not in the bank");
            require(entry.gate.m.cols == hidden, "x has the wrong width");
            const auto at = std::lower_bound(ready.begin(), ready.end(), id, [](const Expert& e, int64_t i) { return e.id < i; });
            if (at == ready.end() || at->id != id) ready.insert(at, {id, &entry.gate.m, &entry.up.m, &entry.down.m});
        }
        return ready;
    }
};

// A layer and what it looks into. Names are the roles of moeflux/models/parts.py.
struct PyLayer {
    Layer layer;
    std::vector<PyMatrix> matrices;
    std::unordered_map<std::string, Floats> vectors;  // by role

    // Throws where sizes do not fit each other: kernels trust them.
    void check(const std::string& where) const;

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
        layer.*place_of(places, role) = m.m;
        matrices.push_back(m);
    }
    void set_vector(const std::string& role, Floats v) {
        static const std::unordered_map<std::string, const float * Layer::*> places = {
            {"mixer_norm", &Layer::mixer_norm}, {"ffn_norm", &Layer::ffn_norm}, {"q_norm", &Layer::q_norm},
            {"k_norm", &Layer::k_norm}, {"q_a_norm", &Layer::q_a_norm}, {"kv_a_norm", &Layer::kv_a_norm},
            {"conv1d", &Layer::conv}, {"A_log", &Layer::a_log}, {"dt_bias", &Layer::dt_bias}, {"norm", &Layer::norm},
            {"router_bias", &Layer::router_bias}};
        layer.*place_of(places, role) = v.data();
        vectors[role] = v;
    }
    template <class Places>
    static typename Places::mapped_type place_of(const Places& places, const std::string& role) {
        const auto found = places.find(role);
        require_format(found != places.end(), "a native layer has no place for " + role);
        return found->second;
    }
    void set_heads(const std::string& role, const PyHeads& h) {
        (role == "embed_q" ? layer.embed_q : layer.unembed_out) = h.w;
        matrices.push_back(h.matrix);
    }
};

// (start, stop, position, first, second) per sequence. A state that grows is given as two arrays of block addresses and the
// bytes of an element, that of a delta net as its two arrays. `first`, `second`: elements per position, or all of them.
struct StateShape {
    int64_t first, second;
    bool grows;
};

inline void read_spans(nb::list list, int64_t tokens, StateShape shape, std::vector<Span>& spans) {
    int64_t at = 0;
    for (nb::handle item : list) {
        nb::tuple t = nb::cast<nb::tuple>(item);
        Span s = {nb::cast<int64_t>(t[0]), nb::cast<int64_t>(t[1]), nb::cast<int64_t>(t[2])};
        require(s.start == at && s.stop > at && s.position >= 0, "spans do not follow each other");
        if (shape.grows) {
            const Addresses first = nb::cast<Addresses>(t[3]), second = nb::cast<Addresses>(t[4]);
            const int64_t element = nb::cast<int64_t>(t[5]), rows = s.position + s.stop - s.start;
            require(element == 4 || element == 2, "state dtype");
            require(int64_t(std::min(first.size(), second.size())) * kStateBlock >= rows, "state is too short");
            s.first = reinterpret_cast<uint8_t* const*>(first.data());
            s.second = reinterpret_cast<uint8_t* const*>(second.data());
            s.dtype = element == 4 ? Dtype::f32 : Dtype::bf16;
        } else {
            Out conv = nb::cast<Out>(t[3], false), delta = nb::cast<Out>(t[4], false);
            require_size(conv, shape.first, "conv");
            require_size(delta, shape.second, "delta");
            s.conv = conv.data();
            s.delta = delta.data();
        }
        s.decodes = nb::cast<bool>(t[t.size() - 1]);
        at = s.stop;
        spans.push_back(s);
    }
    require(at == tokens, "spans do not cover the tokens");
}

inline std::vector<Span> spans_of(nb::list list, int64_t tokens, StateShape shape) {
    std::vector<Span> spans;
    read_spans(list, tokens, shape, spans);
    return spans;
}

inline StateShape delta_state(const DeltaShape& s) {
    return {(s.width - 1) * s.channels(), s.heads * s.key_dim * s.value_dim, false};
}

inline StateShape state_shape(const Layer& l) {
    switch (l.mixer) {
        case Mixer::attention: return {l.shape.groups * l.shape.dim, l.shape.groups * l.shape.dim, true};
        case Mixer::latent: return {l.kv_a.rows, l.kv_a.rows, true};
        case Mixer::delta: break;
    }
    return delta_state(l.delta);
}

// Methods of the machine: its blocks, and whole layers.
void bind_blocks(nb::class_<Machine>& machine);
void bind_layers(nb::module_& m, nb::class_<Machine>& machine);
void bind_predictor(nb::module_& m);

}  // namespace moeflux
