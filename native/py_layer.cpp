// Whether the sizes of a layer fit each other.
#include "py_types.h"

namespace moeflux {

namespace {

constexpr int64_t kMaxSize = 1 << 20;  // of heads, of a head, ...: no product of three of them overflows

class LayerCheck {
public:
    LayerCheck(const PyLayer& layer, const std::string& where) : of_(layer), l_(layer.layer), where_(where) {}

    void all() const {
        size("hidden size", l_.hidden, kMaxSize);
        vector("mixer_norm", l_.hidden);
        vector("ffn_norm", l_.hidden);
        switch (l_.mixer) {
            case Mixer::attention: attention(); break;
            case Mixer::latent: latent(); break;
            case Mixer::delta: delta(); break;
        }
        if (!l_.moe()) return mlp("", l_.gate_proj, l_.up_proj, l_.down_proj);
        routing();
        if (l_.shared_gate_proj.rows) mlp("shared_", l_.shared_gate_proj, l_.shared_up_proj, l_.shared_down_proj);
        if (l_.shared_gate.rows) matrix("shared_gate", l_.shared_gate, 1, l_.hidden);
    }

private:
    void say(bool fits, const std::string& what) const { require_format(fits, what, where_); }

    void size(const std::string& name, int64_t n, int64_t most) const {
        say(n >= 1 && n <= most, name + " is " + std::to_string(n) + ", not 1 to " + std::to_string(most));
    }
    void vector(const std::string& role, int64_t n) const {
        const auto found = of_.vectors.find(role);
        const int64_t there = found == of_.vectors.end() ? 0 : int64_t(found->second.size());
        say(there == n, role + " has " + std::to_string(there) + " numbers, needs " + std::to_string(n));
    }
    void matrix(const std::string& role, const Matrix& m, int64_t rows, int64_t cols) const {
        const auto shape = [](int64_t r, int64_t c) { return "[" + std::to_string(r) + ", " + std::to_string(c) + "]"; };
        say(m.rows == rows && m.cols == cols, role + " is " + shape(m.rows, m.cols) + ", needs " + shape(rows, cols));
    }
    void heads(const std::string& role, const HeadMatrix& m, int64_t n_in, int64_t n_out) const {
        const int64_t in = m.transposed ? m.rows : m.matrix.cols, out = m.transposed ? m.matrix.cols : m.rows;
        say(m.heads == l_.heads && in == n_in && out == n_out,
            role + " has " + std::to_string(m.heads) + " heads from " + std::to_string(in) + " to " + std::to_string(out) +
                ", needs " + std::to_string(l_.heads) + " from " + std::to_string(n_in) + " to " + std::to_string(n_out));
    }
    int64_t rope() const { return int64_t(l_.rotation.frequencies.size()) * 2; }

    void attention() const {
        const AttentionShape& s = l_.shape;
        size("number of heads", s.heads, kMaxSize);
        size("number of key-value heads", s.groups, s.heads);
        size("head size", s.dim, kMaxSize);
        say(s.heads % s.groups == 0,
            std::to_string(s.heads) + " heads cannot share " + std::to_string(s.groups) + " key-value heads");
        say(rope() <= s.dim, "rotates " + std::to_string(rope()) + " of the " + std::to_string(s.dim) + " elements of a head");
        matrix("q_proj", l_.q, s.heads * s.dim * (s.gated ? 2 : 1), l_.hidden);
        matrix("k_proj", l_.k, s.groups * s.dim, l_.hidden);
        matrix("v_proj", l_.v, s.groups * s.dim, l_.hidden);
        matrix("o_proj", l_.o, l_.hidden, s.heads * s.dim);
        vector("q_norm", s.dim);
        vector("k_norm", s.dim);
    }
    void latent() const {
        size("number of heads", l_.heads, kMaxSize);
        size("head size", l_.nope, kMaxSize);
        size("rank", l_.rank, kMaxSize);
        size("rotated size", rope() + 1, kMaxSize);
        const int64_t width = l_.heads * (l_.nope + rope()), values = l_.unembed_out.rows;
        if (l_.q_a.rows) {
            matrix("q_a_proj", l_.q_a, l_.q_a.rows, l_.hidden);
            vector("q_a_norm", l_.q_a.rows);
            matrix("q_b_proj", l_.q_b, width, l_.q_a.rows);
        } else {
            matrix("q_proj", l_.q, width, l_.hidden);
        }
        matrix("kv_a_proj", l_.kv_a, l_.rank + rope(), l_.hidden);
        vector("kv_a_norm", l_.rank);
        heads("embed_q", l_.embed_q, l_.nope, l_.rank);
        say(!l_.unembed_out.transposed, "unembed_out is transposed");
        heads("unembed_out", l_.unembed_out, l_.rank, values);
        matrix("o_proj", l_.o, l_.hidden, l_.heads * values);
    }
    void delta() const {
        const DeltaShape& s = l_.delta;
        size("number of value heads", s.heads, kMaxSize);
        size("number of key heads", s.key_heads, s.heads);
        size("key size", s.key_dim, kMaxSize);
        size("value size", s.value_dim, kMaxSize);
        size("width of the convolution", s.width, kMaxTaps);
        say(s.heads % s.key_heads == 0,
            std::to_string(s.heads) + " value heads cannot share " + std::to_string(s.key_heads) + " key heads");
        const int64_t values = s.heads * s.value_dim;
        if (l_.qkvz.rows) {
            matrix("in_proj_qkvz", l_.qkvz, s.channels() + values, l_.hidden);
            matrix("in_proj_ba", l_.ba, 2 * s.heads, l_.hidden);
        } else {
            matrix("in_proj_qkv", l_.qkv, s.channels(), l_.hidden);
            matrix("in_proj_z", l_.z, values, l_.hidden);
            matrix("in_proj_b", l_.b, s.heads, l_.hidden);
            matrix("in_proj_a", l_.a, s.heads, l_.hidden);
        }
        matrix("out_proj", l_.out, l_.hidden, values);
        vector("conv1d", s.channels() * s.width);
        vector("A_log", s.heads);
        vector("dt_bias", s.heads);
        vector("norm", s.value_dim);
    }
    void routing() const {
        const RouterShape& s = l_.routing;
        size("number of experts", s.experts, kMaxSize);
        size("experts per token", s.k, s.experts);
        size("number of groups", s.groups, s.experts);
        size("groups per token", s.top_groups, s.groups);
        say(s.experts % s.groups == 0,
            std::to_string(s.experts) + " experts are not " + std::to_string(s.groups) + " equal groups");
        matrix("router", l_.router, s.experts, l_.hidden);
        if (s.sigmoid) vector("router_bias", s.experts);
    }
    void mlp(const std::string& prefix, const Matrix& gate, const Matrix& up, const Matrix& down) const {
        size("width of the MLP", gate.rows, kMaxCols);
        matrix(prefix + "gate_proj", gate, gate.rows, l_.hidden);
        matrix(prefix + "up_proj", up, gate.rows, l_.hidden);
        matrix(prefix + "down_proj", down, l_.hidden, gate.rows);
    }

    const PyLayer& of_;
    const Layer& l_;
    const std::string& where_;
};

}  // namespace

void PyLayer::check(const std::string& where) const { LayerCheck(*this, where).all(); }

}  // namespace moeflux
