// Whole layers for Python: one at a time, or all of them with experts from banks or from a store.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "py_errors.h"
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

// The norm and the product behind the last layer, for some rows of its output.
struct Head {
    Floats norm;
    float eps;
    const Matrix* matrix;
    Ids rows;
    Out normed, logits;
    int64_t hidden;

    // (norm, eps, matrix, rows, normed [R, hidden], logits [R, vocab])
    Head(nb::tuple t, const Out& x)
        : norm(nb::cast<Floats>(t[0])), eps(nb::cast<float>(t[1])), matrix(&nb::cast<const PyMatrix&>(t[2]).m),
          rows(nb::cast<Ids>(t[3])), normed(nb::cast<Out>(t[4])), logits(nb::cast<Out>(t[5])), hidden(int64_t(x.shape(1))) {
        const int64_t n = int64_t(rows.size());
        require(matrix->cols == hidden, "head");
        require_size(norm, hidden, "norm");
        require_size(normed, n * hidden, "normed");
        require_size(logits, n * matrix->rows, "logits");
        for (int64_t i = 0; i < n; ++i) require(rows.data()[i] >= 0 && rows.data()[i] < int64_t(x.shape(0)), "rows");
    }

    void run(Machine& machine, const float* x) const {
        const int64_t n = int64_t(rows.size());
        for (int64_t i = 0; i < n; ++i)
            machine.rms_norm(x + rows.data()[i] * hidden, norm.data(), eps, 1, hidden, normed.data() + i * hidden);
        machine.linears(normed.data(), n, {matrix}, {logits.data()});
    }
};

// Handlers of signals are Python and may do anything, but run nothing on the machine that is in the middle of a forward.
std::function<void()> outside(Machine& machine, std::function<void()> handlers) {
    if (!handlers) return handlers;
    return [&machine, handlers = std::move(handlers)] {
        const Machine::Outside outside(machine);
        handlers();
    };
}

// What kernels trust: experts as wide as the layers, and as many as their routers choose from.
void check_experts(const Store& store, std::span<const Step> steps) {
    for (size_t i = 0; i < steps.size(); ++i) {
        const Layer& l = *steps[i].layer;
        if (!l.moe()) continue;
        const std::string where = "layer " + std::to_string(i);
        const bool there = int(i) < store.n_layers() && store.layer(int(i)).n_experts == l.routing.experts;
        require_format(there, "its router chooses from " + std::to_string(l.routing.experts) + " experts, the store has others",
                       where);
        const int64_t cols = store.layer(int(i)).gate.shape.cols;
        require_format(cols == l.hidden,
                       "experts of " + std::to_string(cols) + " columns, hidden size " + std::to_string(l.hidden), where);
    }
}

// A stream between two forwards. Python's lock is not held while another thread's forward is waited for, which may want it.
class Quiet {
public:
    explicit Quiet(Stream& stream) : call_(stream.machine()), stream_(stream) {}
    Stream* operator->() const { return &stream_; }

private:
    const Unlocked unlocked_;
    const Machine::Call call_;
    Stream& stream_;
};

Quiet quiet(Stream& stream) { return Quiet(stream); }

}  // namespace

void bind_layers(nb::module_& m, nb::class_<Machine>& machine) {
    // Returns -1, or the layer whose scores are not finite. `head`: what follows the last layer, where logits are wanted.
    machine.def("run_layers",
        [](Machine& self, nb::list layers, Out x, nb::list spans, Stream& stream, const CancelFlag* cancel, nb::object head) {
            require(spans.size() == layers.size() && x.ndim() == 2, "layers");
            require(&stream.machine() == &self, "a stream of another machine");
            const Forward forward(layers, spans, int64_t(x.shape(0)), int64_t(x.shape(1)));
            check_experts(stream.store(), forward.steps);
            std::optional<Head> last;
            if (!head.is_none()) last.emplace(nb::cast<nb::tuple>(head), x);
            Listener listener(cancel, outside(self, signals()));
            const Unlocked unlocked;
            const Stream::Run run(stream, forward.steps, listener);
            const auto broken = run_layers(self, forward.steps, x.data(), int64_t(x.shape(0)), stream);
            if (broken < 0 && last) last->run(self, x.data());
            return broken;
        },
        nb::arg("layers"), nb::arg("x"), nb::arg("spans"), nb::arg("stream"), nb::arg("cancel").none() = nb::none(),
        nb::arg("head").none() = nb::none());
    nb::class_<Stream>(m, "Stream", "Experts for forwards from a store, with hints for the layers that follow.")
        .def("__init__",
             [](Stream* self, std::shared_ptr<Store> store, Machine& on, bool previous, bool lookahead, int most) {
                 new (self) Stream(std::move(store), on, {previous, lookahead, most});
             },
             nb::arg("store"), nb::arg("machine"), nb::arg("previous"), nb::arg("lookahead"), nb::arg("most"),
             nb::keep_alive<1, 3>())
        .def("record", [](Stream& s, bool on) { quiet(s)->record(on); })
        .def_prop_ro("routed", [](Stream& self) {
            const std::vector<int16_t> routed = quiet(self)->routed();
            return nb::bytes(routed.data(), routed.size() * sizeof(int16_t));
        })
        .def_prop_ro("width", [](Stream& s) { return quiet(s)->reach().width(); })
        .def_prop_ro("depth", [](Stream& s) { return quiet(s)->reach().depth(); })
        .def_prop_ro("guessed", [](Stream& s) { return quiet(s)->guessed(); })
        .def_prop_ro("asked", [](Stream& s) { return quiet(s)->asked(); })
        .def_prop_ro("foreseen", [](Stream& s) { return quiet(s)->foreseen(); });
}

}  // namespace moeflux
