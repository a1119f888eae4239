#include "layer.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "buffers.h"

namespace moeflux {

namespace {

// Of mixers and dense layers, whose own values are many times as wide as x: so that they stay in the caches, and cost little
// memory.
constexpr int64_t kTurnTokens = 256;

void expect_ffn(Machine& m, const Layer& l) {
    if (l.moe()) m.expect({&l.router});
    else m.expect({&l.gate_proj, &l.up_proj});
}

void run_attention(Machine& m, const Layer& l, const float* h, int64_t tokens, Spans spans, float* y) {
    float* q = m.floats(0, tokens * l.q.rows);
    float* k = m.floats(1, tokens * l.k.rows);
    float* v = m.floats(2, tokens * l.v.rows);
    float* mixed = m.floats(3, tokens * l.shape.heads * l.shape.dim);
    m.expect({&l.o});
    m.linears(h, tokens, {&l.q, &l.k, &l.v}, {q, k, v});
    m.attention(q, k, v, l.q_norm, l.k_norm, l.eps, l.shape, l.rotation, spans, mixed);
    expect_ffn(m, l);
    m.linears(mixed, tokens, {&l.o}, {y});
}

void run_latent(Machine& m, const Layer& l, const float* h, int64_t tokens, Spans spans, float* y) {
    const int64_t rope = int64_t(l.rotation.frequencies.size()) * 2, width = l.nope + rope;
    float* q = m.floats(0, tokens * l.heads * width);
    float* kv = m.floats(1, tokens * l.kv_a.rows);
    if (l.q_a.rows == 0) {
        m.linears(h, tokens, {&l.q, &l.kv_a}, {q, kv});
    } else {
        float* low = m.floats(2, tokens * l.q_a.rows);
        m.linears(h, tokens, {&l.q_a, &l.kv_a}, {low, kv});
        m.rms_norm(low, l.q_a_norm, l.latent_eps, tokens, l.q_a.rows, low);
        m.linears(low, tokens, {&l.q_b}, {q});
    }
    float* nope = m.floats(2, tokens * l.heads * l.nope);
    for (int64_t i = 0; i < tokens * l.heads; ++i) std::memcpy(nope + i * l.nope, q + i * width, size_t(l.nope) * 4);
    float* q_latent = m.floats(3, tokens * l.heads * l.rank);
    float* mixed = m.floats(4, tokens * l.heads * l.rank);
    m.head_linear(nope, tokens, l.embed_q, q_latent);
    m.latent_attention(q_latent, q + l.nope, width, kv, l.kv_a_norm, l.latent_eps, l.heads, l.rank, l.scale, l.rotation,
                       spans, mixed);
    float* values = m.floats(2, tokens * l.heads * l.unembed_out.rows);
    m.head_linear(mixed, tokens, l.unembed_out, values);
    expect_ffn(m, l);
    m.linears(values, tokens, {&l.o}, {y});
}

// What a layer is multiplied with first.
struct FirstMatrices {
    const Matrix* all[4];
    size_t n = 0;

    explicit FirstMatrices(const Layer* l) {
        if (!l) return;
        switch (l->mixer) {
            case Mixer::attention: set({&l->q, &l->k, &l->v}); break;
            case Mixer::latent: set({l->q_a.rows ? &l->q_a : &l->q, &l->kv_a}); break;
            case Mixer::delta:
                if (l->qkvz.rows) set({&l->qkvz, &l->ba});
                else set({&l->qkv, &l->z, &l->b, &l->a});
        }
    }
    void set(std::initializer_list<const Matrix*> matrices) {
        for (const Matrix* m : matrices) all[n++] = m;
    }
    operator Matrices() const { return {all, n}; }
};

// Undo the interleaving by key head of the fused projections.
void split_fused(const Layer& l, const float* qkvz, const float* ba, int64_t tokens, float* qkv, float* z, float* b, float* a) {
    const auto& s = l.delta;
    const int64_t ratio = s.heads / s.key_heads, dk = s.key_dim, dv = ratio * s.value_dim;
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t g = 0; g < s.key_heads; ++g) {
            const float* from = qkvz + (t * s.key_heads + g) * 2 * (dk + dv);
            float* to = qkv + t * s.channels();
            std::memcpy(to + g * dk, from, size_t(dk) * 4);
            std::memcpy(to + (s.key_heads + g) * dk, from + dk, size_t(dk) * 4);
            std::memcpy(to + 2 * s.key_heads * dk + g * dv, from + 2 * dk, size_t(dv) * 4);
            std::memcpy(z + (t * s.key_heads + g) * dv, from + 2 * dk + dv, size_t(dv) * 4);
            const float* gates = ba + (t * s.key_heads + g) * 2 * ratio;
            std::memcpy(b + t * s.heads + g * ratio, gates, size_t(ratio) * 4);
            std::memcpy(a + t * s.heads + g * ratio, gates + ratio, size_t(ratio) * 4);
        }
}

void run_delta(Machine& m, const Layer& l, const float* h, int64_t tokens, Spans spans, float* y) {
    const auto& s = l.delta;
    const int64_t value_width = s.heads * s.value_dim;
    float* qkv = m.floats(0, tokens * s.channels());
    float* z = m.floats(1, tokens * value_width);
    float* b = m.floats(2, tokens * s.heads);
    float* a = m.floats(3, tokens * s.heads);
    float* mixed = m.floats(4, tokens * value_width);
    m.expect({&l.out});
    if (l.qkvz.rows) {
        float* qkvz = m.floats(5, tokens * l.qkvz.rows);
        float* ba = m.floats(6, tokens * l.ba.rows);
        m.linears(h, tokens, {&l.qkvz, &l.ba}, {qkvz, ba});
        split_fused(l, qkvz, ba, tokens, qkv, z, b, a);
    } else {
        m.linears(h, tokens, {&l.qkv, &l.z, &l.b, &l.a}, {qkv, z, b, a});
    }
    m.delta_net(qkv, z, a, b, l.conv, l.a_log, l.dt_bias, l.norm, l.eps, s, spans, mixed);
    expect_ffn(m, l);
    m.linears(mixed, tokens, {&l.out}, {y});
}

// x += mixer(norm(x)); h = norm(x); and the router's choice where there is one. False where a score is not finite.
bool run_mixer(Machine& m, const Layer& l, float* x, int64_t tokens, Spans spans, float* h, int64_t* ids, float* weights) {
    float* y = m.floats(7, tokens * l.hidden);
    m.rms_norm(x, l.mixer_norm, l.eps, tokens, l.hidden, h);
    switch (l.mixer) {
        case Mixer::attention: run_attention(m, l, h, tokens, spans, y); break;
        case Mixer::latent: run_latent(m, l, h, tokens, spans, y); break;
        case Mixer::delta: run_delta(m, l, h, tokens, spans, y); break;
    }
    m.add_norm(x, y, l.ffn_norm, l.eps, tokens, l.hidden, x, h);
    if (!l.moe()) return true;
    float* logits = m.floats(0, tokens * l.router.rows);
    if (l.shared_gate_proj.rows) m.expect({&l.shared_gate_proj, &l.shared_up_proj});
    m.linears(h, tokens, {&l.router}, {logits});
    return m.route(logits, l.router_bias, tokens, l.routing, ids, weights);
}

// The parts of spans that lie in tokens [first, last), counted from `first`.
void cut(Spans spans, int64_t first, int64_t last, std::vector<Span>& out) {
    out.clear();
    for (const Span& span : spans) {
        const int64_t start = std::max(span.start, first), stop = std::min(span.stop, last);
        if (start >= stop) continue;
        out.push_back(span);
        out.back().start = start - first;
        out.back().stop = stop - first;
        out.back().position += start - span.start;
    }
}

// Later tokens find what earlier ones left in the state, as they do in the next chunk.
bool run_mixer_in_turns(Machine& m, const Layer& l, float* x, int64_t tokens, Spans spans, float* h, int64_t* ids,
                        float* weights, ExpertSource& source) {
    const Machine::Call call(m);
    if (tokens <= kTurnTokens) return run_mixer(m, l, x, tokens, spans, h, ids, weights);
    std::vector<Span> some;
    bool finite = true;
    in_turns(tokens, kTurnTokens, [&](int64_t t, int64_t n) {
        source.listen();
        cut(spans, t, t + n, some);
        finite = finite && run_mixer(m, l, x + t * l.hidden, n, some, h + t * l.hidden, ids + t * l.routing.k,
                                     weights + t * l.routing.k);
    });
    return finite;
}

void mlp_in_turns(Machine& m, const float* h, int64_t tokens, const SharedExpert& e, float* y, ExpertSource& source) {
    in_turns(tokens, kTurnTokens, [&](int64_t t, int64_t n) {
        source.listen();
        m.mlp(h + t * e.gate->cols, n, *e.gate, *e.up, *e.down, e.output_gate, y + t * e.down->rows);
    });
}

// x += experts(h) + shared(h), or x += mlp(h). `after`: the layer that follows, if any.
void run_ffn(Machine& m, const Layer& l, float* x, const float* h, int64_t tokens, const int64_t* ids, const float* weights,
             ExpertSource& source, const Layer* after) {
    const Machine::Call call(m);
    float* y = m.floats(7, tokens * l.hidden);
    if (!l.moe()) {
        mlp_in_turns(m, h, tokens, {&l.gate_proj, &l.up_proj, &l.down_proj, nullptr, nullptr}, y, source);
        m.add(x, y, tokens * l.hidden, x);
        return;
    }
    const bool has_shared = l.shared_gate_proj.rows > 0;
    float* outputs = m.floats(5, tokens * l.routing.k * l.hidden);
    const SharedExpert shared = {&l.shared_gate_proj, &l.shared_up_proj, &l.shared_down_proj,
                                 l.shared_gate.rows ? &l.shared_gate : nullptr, has_shared ? m.floats(6, tokens * l.hidden) : nullptr};
    const FirstMatrices then(after);
    const bool at_once = tokens <= kTurnTokens;  // shared and routed experts
    if (has_shared && !at_once) mlp_in_turns(m, h, tokens, shared, shared.y, source);
    bool first = true;
    for (Experts ready = source.next(); first || !ready.empty(); ready = source.next()) {
        if (!at_once) source.listen();
        m.experts(h, tokens, l.hidden, ids, l.routing.k, ready, first && has_shared && at_once ? &shared : nullptr, outputs,
                  then, !first);
        first = false;
    }
    m.combine(outputs, weights, tokens, l.routing.k, l.hidden, y);
    if (has_shared) m.add(y, shared.y, tokens * l.hidden, y);
    m.add(x, y, tokens * l.hidden, x);
}

}  // namespace

int64_t run_layers(Machine& m, std::span<const Step> steps, float* x, int64_t tokens, ExpertSource& source) {
    const Machine::Call call(m);
    int64_t k = 1, hidden = 1;
    for (const Step& step : steps) k = std::max(k, step.layer->routing.k), hidden = step.layer->hidden;
    float *h = m.floats(8, tokens * hidden), *weights = m.floats(9, tokens * k);
    auto* ids = reinterpret_cast<int64_t*>(m.floats(10, tokens * k * 2));
    for (size_t i = 0; i < steps.size(); ++i) {
        const Layer& l = *steps[i].layer;
        source.listen();
        if (l.moe()) source.before(i, x, tokens);
        if (!run_mixer_in_turns(m, l, x, tokens, steps[i].spans, h, ids, weights, source)) return int64_t(i);
        if (l.moe()) {
            source.begin(i, ids, tokens * l.routing.k);
            source.meanwhile(i, x, tokens);
        }
        run_ffn(m, l, x, h, tokens, ids, weights, source, i + 1 < steps.size() ? steps[i + 1].layer : nullptr);
        if (l.moe()) source.end();
    }
    return -1;
}

}  // namespace moeflux
