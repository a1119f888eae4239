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

// A sequence's share of a batch and its state: keys and values, latents, or convolution and delta.
struct LayerSpan {
    int64_t start, stop, position;
    uint8_t *first, *second;
    Dtype dtype;
};

// x += mixer(norm(x)); h = norm(x); and the router's choice where there is one. False where a score is not finite.
bool run_mixer(Machine& machine, const Layer& layer, float* x, int64_t tokens, const std::vector<LayerSpan>& spans, float* h,
               int64_t* ids, float* weights);

// x += experts(h) + shared(h), or x += mlp(h).
void run_ffn(Machine& machine, const Layer& layer, float* x, const float* h, int64_t tokens, const int64_t* ids,
             const float* weights, const std::vector<Expert>& ready);

}  // namespace moeflux
