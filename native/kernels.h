// The table of kernels: one per instruction set, chosen once at start. A kernel runs on the calling thread over a range
// that it is given; machine, mixers and experts cut the work. None allocates.
//
// Exactness: what a kernel computes for one (row, token) or (head, token) never depends on the range it was called with
// or on how many tokens came along.
#pragma once

#include "types.h"

namespace moeflux {

constexpr int kMaxTaps = 64;         // of a convolution
constexpr int kAttendTokens = 16;    // tokens that share one pass over the keys,
constexpr int kAttendHeads = 8;      // and heads
constexpr int kAttendBlock = 64;     // positions per step of the online softmax, aligned to absolute positions
constexpr int kAttendTurned = 32;    // keys that are turned round at a time

struct AttendSpan {
    const float* q;  // [T, heads, dim], rotated
    float* out;      // [T, heads, value_dim]
    const uint8_t *const *keys, *const *values;  // blocks of kStateBlock positions
    int64_t key_stride, value_stride;  // in elements, from position to position
    int64_t heads, groups, dim, value_dim;
    int64_t position;  // of the first token
    float scale;
    Dtype dtype;  // of keys and values
};

struct DeltaSpan {
    const float* u;  // [T, channels] after convolution, silu and delta_keys: q | k | v
    const float* z;  // [T, heads, value_dim]
    const float *decay, *beta;  // [T, heads]
    const float* norm;  // [value_dim]
    float* state;  // [heads, key_dim, value_dim]
    float* out;    // [T, heads, value_dim]
    int64_t tokens, channels, key_heads, heads, key_dim, value_dim;
    int64_t z_stride;  // elements from token to token
    float eps;
};

// Rows of a matrix that come next; a null matrix means nothing is known.
struct Next {
    const Matrix* matrix = nullptr;
    int64_t row = 0;
};

constexpr int64_t kMostTokens = 512;  // of one call of `rows`

struct Kernels {
    const char* name;

    // The layout in which `rows` wants this matrix' activations.
    Layout (*layout)(const Matrix&);
    // One token's record from floats.
    void (*quantize)(const float* x, int64_t cols, int group, Layout, uint8_t* record);
    // y[t][r] for r in [first, last), from records in the matrix' layout. `next`: what this thread will read after that,
    // to be prefetched. `work`: workspace_bytes() of scratch. At most kMostTokens.
    void (*rows)(const Matrix&, Layout, const uint8_t* const* records, int64_t tokens, float* const* y, int64_t first,
                 int64_t last, Next next, uint8_t* work);
    size_t (*workspace_bytes)();
    // One row as floats.
    void (*decode_row)(const Matrix&, int64_t row, float* out);

    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* y);
    void (*add)(const float* a, const float* b, int64_t n, float* y);
    // y += w * x
    void (*axpy)(float w, const float* x, int64_t n, float* y);
    void (*silu_mul)(const float* gate, const float* up, int64_t n, float* y);
    void (*sigmoid)(const float* x, int64_t n, float* y);
    void (*softmax)(float* x, int64_t n);
    void (*sigmoid_mul)(const float* gate, int64_t n, float* y);  // y *= sigmoid(gate)
    float (*dot)(const float* a, const float* b, int64_t n);

    // Tokens [first, last) of heads [first_head, last_head), which share one key-value group. `work`: attend_work floats.
    void (*attend)(const AttendSpan&, int64_t first_head, int64_t last_head, int64_t first, int64_t last, float* work);
    // Channels [first, last): causal convolution and silu over all tokens; moves the state on. weight [channels, width],
    // state [width - 1, channels].
    void (*convolve)(const float* x, int64_t tokens, int64_t channels, const float* weight, int64_t width, float* state,
                     int64_t first, int64_t last, float* y);
    // For the choice of a token, see isa/choice.h. `allowed` may be null.
    void (*weigh)(const float* x, const uint8_t* allowed, int64_t n, float peak, float temperature, float* y);
    double (*exp_total)(const float* x, int64_t n, float peak);
    double (*sum_from)(const float* x, int64_t n, float bound, int64_t* count);
    int64_t (*between)(const float* x, int64_t n, float low, float high, float* out);
    // What the machine can do at best, for benches: the bytes XORed together (so that none is left out), and integer
    // multiply-adds from registers alone, `rounds` times the returned number.
    uint64_t (*read_all)(const uint8_t* p, size_t n);
    int64_t (*multiply_only)(int64_t rounds);

    // q and k of one key head to unit length, q over the root of the dimension too, in u as DeltaSpan has it.
    void (*delta_keys)(float* u, int64_t tokens, int64_t channels, int64_t key_heads, int64_t key_dim, int64_t key_head);
    // One value head over all tokens.
    void (*delta_head)(const DeltaSpan&, int64_t head);
};

const Kernels* generic_kernels();
const Kernels* avx2_kernels();         // null where not compiled
const Kernels* avx_vnni_kernels();     // null where not compiled
const Kernels* avx512_vnni_kernels();  // null where not compiled

// Floats of scratch that `attend` needs: shares and values of the lanes, and turned keys or a strip of values.
static inline size_t attend_work(int64_t heads, int64_t dim, int64_t value_dim) {
    const size_t keys = size_t(kAttendTurned) * size_t(dim), strip = size_t(kAttendBlock) * 32;
    return size_t(kAttendTokens * heads) * size_t(value_dim + kAttendBlock) + (keys > strip ? keys : strip);
}

}  // namespace moeflux
