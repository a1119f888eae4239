// The machine's blocks for Python, and what it can do at best.
#include <nanobind/stl/vector.h>

#include "py_types.h"

namespace moeflux {

void bind_blocks(nb::class_<Machine>& machine) {
    machine
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
                 const Unlocked unlocked;
                 self.linears(x.data(), tokens, ms, ys);
             })
        .def("head_linear",
             [](Machine& self, Floats x, const PyHeads& w, Out y) {
                 const int64_t n_in = w.w.transposed ? w.w.rows : w.w.matrix.cols, n_out = w.w.transposed ? w.w.matrix.cols : w.w.rows;
                 require(x.ndim() >= 1, "x has no rows");
                 const int64_t tokens = int64_t(x.shape(0));
                 require_size(x, tokens * w.w.heads * n_in, "x");
                 require_size(y, tokens * w.w.heads * n_out, "y");
                 const Unlocked unlocked;
                 self.head_linear(x.data(), tokens, w.w, y.data());
             })
        .def("embed",
             [](Machine& self, const PyMatrix& table, Ids ids, Out y) {
                 for (size_t i = 0; i < ids.size(); ++i) require(ids.data()[i] >= 0 && ids.data()[i] < table.m.rows, "token");
                 require_size(y, int64_t(ids.size()) * table.m.cols, "y");
                 const Unlocked unlocked;
                 self.embed(table.m, ids.data(), int64_t(ids.size()), y.data());
             })
        .def("rms_norm",
             [](Machine& self, Floats x, Floats weight, float eps, Out y) {
                 const int64_t n = int64_t(weight.size());
                 require(n > 0 && int64_t(x.size()) % n == 0, "x");
                 require_size(y, int64_t(x.size()), "y");
                 const Unlocked unlocked;
                 self.rms_norm(x.data(), weight.data(), eps, int64_t(x.size()) / n, n, y.data());
             })
        .def("add_norm",
             [](Machine& self, Floats a, Floats b, Floats weight, float eps, Out sum, Out y) {
                 const int64_t n = int64_t(weight.size()), all = int64_t(a.size());
                 require(n > 0 && all % n == 0, "a");
                 require_size(b, all, "b");
                 require_size(sum, all, "sum");
                 require_size(y, all, "y");
                 const Unlocked unlocked;
                 self.add_norm(a.data(), b.data(), weight.data(), eps, all / n, n, sum.data(), y.data());
             })
        .def("mlp",
             [](Machine& self, Floats x, const PyMatrix& gate, const PyMatrix& up, const PyMatrix& down,
                const PyMatrix* output_gate, Out y) {
                 require(x.ndim() == 2, "x has no rows");
                 const int64_t tokens = int64_t(x.shape(0));
                 require_size(x, tokens * gate.m.cols, "x");
                 require(up.m.cols == gate.m.cols && up.m.rows == gate.m.rows && down.m.cols == gate.m.rows, "mlp");
                 require(!output_gate || (output_gate->m.rows == 1 && output_gate->m.cols == gate.m.cols), "gate");
                 require_size(y, tokens * down.m.rows, "y");
                 const Unlocked unlocked;
                 self.mlp(x.data(), tokens, gate.m, up.m, down.m, output_gate ? &output_gate->m : nullptr, y.data());
             },
             nb::arg("x"), nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("output_gate").none(), nb::arg("y"))
        .def("attention",
             [](Machine& self, Floats q, Floats k, Floats v, Floats q_norm, Floats k_norm, float eps, int64_t heads, int64_t groups,
                int64_t dim, bool gated, const Rotation& rotation, nb::list spans, Out out) {
                 require(q.ndim() >= 1, "q has no rows");
                 const int64_t tokens = int64_t(q.shape(0));
                 require(heads > 0 && groups > 0 && heads % groups == 0, "heads");
                 require(int64_t(rotation.frequencies.size()) * 2 <= dim, "rotation");
                 require_size(q, tokens * heads * dim * (gated ? 2 : 1), "q");
                 require_size(k, tokens * groups * dim, "k");
                 require_size(v, tokens * groups * dim, "v");
                 require_size(q_norm, dim, "q_norm");
                 require_size(k_norm, dim, "k_norm");
                 require_size(out, tokens * heads * dim, "out");
                 const auto all = spans_of(spans, tokens, {groups * dim, groups * dim, true});
                 const Unlocked unlocked;
                 self.attention(q.data(), k.data(), v.data(), q_norm.data(), k_norm.data(), eps, {heads, groups, dim, gated},
                                rotation, all, out.data());
             })
        .def("latent_attention",
             [](Machine& self, Floats q_latent, Floats q, int64_t nope, Floats kv, Floats norm, float eps, float scale,
                const Rotation& rotation, nb::list spans, Out out) {
                 require(q_latent.ndim() == 3 && nope >= 0, "q has no heads");
                 const int64_t tokens = int64_t(q_latent.shape(0)), heads = int64_t(q_latent.shape(1));
                 const int64_t rank = int64_t(q_latent.shape(2)), rope = int64_t(rotation.frequencies.size()) * 2;
                 require_size(q, tokens * heads * (nope + rope), "q");
                 require_size(kv, tokens * (rank + rope), "kv");
                 require_size(norm, rank, "norm");
                 require_size(out, tokens * heads * rank, "out");
                 const auto all = spans_of(spans, tokens, {rank + rope, rank + rope, true});
                 const Unlocked unlocked;
                 self.latent_attention(q_latent.data(), q.data() + nope, nope + rope, kv.data(), norm.data(), eps, heads, rank,
                                       scale, rotation, all, out.data());
             })
        .def("delta_net",
             [](Machine& self, Floats qkv, Floats z, Floats a, Floats b, Floats conv, Floats a_log, Floats dt_bias, Floats norm,
                float eps, int64_t key_heads, int64_t heads, int64_t key_dim, int64_t value_dim, nb::list spans, Out out) {
                 require(qkv.ndim() == 2, "qkv has no rows");
                 const int64_t tokens = int64_t(qkv.shape(0));
                 require(key_heads > 0 && heads > 0 && heads % key_heads == 0, "heads");
                 require(conv.ndim() == 2 && conv.shape(1) >= 1 && conv.shape(1) <= kMaxTaps, "width of the convolution");
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
                 const auto all = spans_of(spans, tokens, delta_state(s));
                 const Unlocked unlocked;
                 self.delta_net(qkv.data(), z.data(), a.data(), b.data(), conv.data(), a_log.data(), dt_bias.data(), norm.data(),
                                eps, s, all, out.data());
             })
        .def("route",
             [](Machine& self, Out logits, nb::object bias, int64_t k, int64_t groups, int64_t top_groups, bool normalize,
                float scale, OutIds ids, Out weights) {
                 require(logits.ndim() == 2, "logits have no rows");
                 const int64_t tokens = int64_t(logits.shape(0)), experts = int64_t(logits.shape(1));
                 require(k >= 1 && k <= experts && groups >= 1 && experts % groups == 0 && top_groups <= groups, "experts or groups");
                 const float* b = nullptr;
                 if (!bias.is_none()) {
                     const Floats values = nb::cast<Floats>(bias);
                     require_size(values, experts, "bias");
                     b = values.data();
                 }
                 require_size(ids, tokens * k, "ids");
                 require_size(weights, tokens * k, "weights");
                 const RouterShape s = {b != nullptr, experts, k, groups, top_groups, normalize, scale};
                 const Unlocked unlocked;
                 return self.route(logits.data(), b, tokens, s, ids.data(), weights.data());
             },
             nb::arg("logits"), nb::arg("bias").none(), nb::arg("k"), nb::arg("groups"), nb::arg("top_groups"),
             nb::arg("normalize"), nb::arg("scale"), nb::arg("ids"), nb::arg("weights"))
        // Some of the chosen experts now, others in a later call, then `combine`: for experts that arrive one by one.
        .def("experts_some",
             [](Machine& self, Floats x, Ids ids, const PyBank& bank, Ids which, Out outputs) {
                 require(x.ndim() == 2 && ids.ndim() == 2 && x.shape(0) == ids.shape(0), "experts");
                 const int64_t tokens = int64_t(x.shape(0)), hidden = int64_t(x.shape(1)), k = int64_t(ids.shape(1));
                 require_size(outputs, tokens * k * hidden, "outputs");
                 for (size_t i = 0; i < ids.size(); ++i) require(ids.data()[i] >= 0, "expert id");
                 const auto ready = bank.chosen(which.data(), which.size(), hidden);
                 const Unlocked unlocked;
                 self.experts(x.data(), tokens, hidden, ids.data(), k, ready, nullptr, outputs.data());
             })
        .def("time_read",
             [](Machine& self, Bytes buffer) {
                 const Unlocked unlocked;
                 return self.time_read(buffer.data(), buffer.size());
             })
        .def("multiply_rate", &Machine::multiply_rate, nb::call_guard<Unlocked>())
        .def("combine", [](Machine& self, Floats outputs, Floats weights, Out y) {
            require(outputs.ndim() == 3 && weights.ndim() == 2, "combine");
            const int64_t tokens = int64_t(outputs.shape(0)), k = int64_t(outputs.shape(1)), hidden = int64_t(outputs.shape(2));
            require_size(weights, tokens * k, "weights");
            require_size(y, tokens * hidden, "y");
            const Unlocked unlocked;
            self.combine(outputs.data(), weights.data(), tokens, k, hidden, y.data());
        });
}

}  // namespace moeflux
