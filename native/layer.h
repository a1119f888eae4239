// One layer as the machine runs it: constant, built once, pointers into arrays that Python keeps alive.
#pragma once

#include "machine.h"

namespace moeflux {

enum class Mixer : int { attention, latent, delta };

struct Layer {
    Mixer mixer = Mixer::attention;
    int64_t hidden = 0;
    float eps = 0;
    const float *mixer_norm = nullptr, *ffn_norm = nullptr;

    // attention and latent attention
    Matrix q, k, v, o;
    const float *q_norm = nullptr, *k_norm = nullptr;
    AttentionShape shape = {};
    Rotation rotation;

    // latent attention: q comes through q_a and q_b where there is a q_a
    Matrix q_a, q_b, kv_a;
    const float *q_a_norm = nullptr, *kv_a_norm = nullptr;
    HeadMatrix embed_q, unembed_out;
    int64_t heads = 0, nope = 0, rank = 0;
    float scale = 0, latent_eps = 0;

    // delta net: either qkv, z, b, a or the fused qkvz, ba
    Matrix qkv, z, b, a, qkvz, ba, out;
    const float *conv = nullptr, *a_log = nullptr, *dt_bias = nullptr, *norm = nullptr;
    DeltaShape delta = {};

    // experts, or a dense MLP where there is no router
    Matrix router, shared_gate_proj, shared_up_proj, shared_down_proj, shared_gate;
    Matrix gate_proj, up_proj, down_proj;
    const float* router_bias = nullptr;
    RouterShape routing = {};

    bool moe() const { return router.rows > 0; }
};

// Where the experts come from that a layer's tokens chose. `next` gives some that are there, never one twice, and none when
// all were given; they may be used until `end`.
class ExpertSource {
public:
    virtual ~ExpertSource() = default;
    // Called many times in a run, when nothing is half done: throws where the run should end.
    virtual void listen() {}
    // Before a layer's mixer: x [T, hidden] as it comes in.
    virtual void before(size_t, const float*, int64_t) {}
    virtual void begin(size_t layer, const int64_t* ids, int64_t n) = 0;
    // Called after `begin`, when reads are under way: x [T, hidden] as it is between mixer and experts.
    virtual void meanwhile(size_t, const float*, int64_t) {}
    virtual Experts next() = 0;
    virtual void end() = 0;
};

struct Step {
    const Layer* layer;
    Spans spans;
};

// All layers over x [T, hidden]. Returns -1, or the layer whose scores are not finite.
int64_t run_layers(Machine& machine, std::span<const Step> steps, float* x, int64_t tokens, ExpertSource& source);

}  // namespace moeflux
