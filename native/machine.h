// Blocks over many tokens: cuts work into chunks for the pool and calls kernels on them. Owns threads and scratch; holds
// no weights and no state. One call at a time; a second caller waits.
//
// Nothing here changes a result: chunks are ranges of rows, heads, channels or tokens, and kernels compute each of those
// alike wherever the range begins and ends.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace moeflux {

// Matrices of several heads in one tensor: head h has rows [h * stride + first, ... + rows).
// `transposed`: y = x W instead of y = W x.
struct HeadMatrix {
    Matrix matrix;
    int64_t heads = 0, stride = 0, first = 0, rows = 0;
    bool transposed = false;
};

struct Rotation {
    std::vector<double> frequencies;  // radians per position, one per pair
    double scale = 1.0;
    bool interleaved = false;
};

struct AttentionShape {
    int64_t heads, groups, dim;
    bool gated;
};

// One sequence's share of a batch: rows [start, stop), state buffers, position of the first row.
struct KvSpan {
    int64_t start, stop, position;
    uint8_t *keys, *values;
    Dtype dtype;
};

struct DeltaShape {
    int64_t key_heads, heads, key_dim, value_dim, width;
    int64_t channels() const { return 2 * key_heads * key_dim + heads * value_dim; }
};

struct DeltaStateSpan {
    int64_t start, stop;
    float *conv, *delta;
};

struct RouterShape {
    bool sigmoid;  // noaux_tc, else softmax
    int64_t experts, k, groups, top_groups;
    bool normalize;
    float scale;
};

struct Expert {
    int64_t id;
    const Matrix *gate, *up, *down;
};

class Machine {
public:
    class Call;  // holds the machine for as long as it lives
    Machine(int threads, const Kernels* kernels, bool exact, bool poison);

    int threads() const { return pool_.size(); }
    const Kernels& kernels() const { return *k_; }
    double seconds() const { return seconds_; }  // spent in calls so far
    size_t scratch_bytes() const;                // asked for at most so far, all buffers together

    // Scratch for a block that is made of several calls: eight buffers, which those calls do not touch.
    float* floats(size_t which, int64_t n);
    void add(const float* a, const float* b, int64_t n, float* y);

    // y[i] = x W_i^T for several matrices with the same inputs. x [T, cols], y[i] [T, rows_i].
    void linears(const float* x, int64_t tokens, const std::vector<const Matrix*>& matrices, const std::vector<float*>& y);
    void head_linear(const float* x, int64_t tokens, const HeadMatrix& w, float* y);
    void embed(const Matrix& table, const int64_t* ids, int64_t tokens, float* y);
    void rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* y);
    // sum = a + b, y = rms_norm(sum)
    void add_norm(const float* a, const float* b, const float* weight, float eps, int64_t rows, int64_t n, float* sum, float* y);
    void mlp(const float* x, int64_t tokens, const Matrix& gate, const Matrix& up, const Matrix& down,
             const Matrix* output_gate, float* y);

    // q [T, heads, dim or 2 dim], k and v [T, groups, dim] straight from the projections -> out [T, heads * dim].
    void attention(const float* q, const float* k, const float* v, const float* q_norm, const float* k_norm, float eps,
                   const AttentionShape& shape, const Rotation& rotation, const std::vector<KvSpan>& spans, float* out);
    // q_latent [T, heads, rank], q_rope [T, heads, rope] (stride q_stride), kv [T, rank + rope] -> out [T, heads, rank].
    void latent_attention(const float* q_latent, const float* q_rope, int64_t q_stride, const float* kv, const float* norm,
                          float eps, int64_t heads, int64_t rank, float scale, const Rotation& rotation,
                          const std::vector<KvSpan>& spans, float* out);
    // qkv [T, channels], z [T, heads, value_dim], a and b [T, heads] -> out [T, heads * value_dim].
    void delta_net(const float* qkv, const float* z, const float* a, const float* b, const float* conv, const float* a_log,
                   const float* dt_bias, const float* norm, float eps, const DeltaShape& shape,
                   const std::vector<DeltaStateSpan>& spans, float* out);

    // False where a score is not finite.
    bool route(float* logits, const float* bias, int64_t tokens, const RouterShape& shape, int64_t* ids, float* weights);
    // Outputs of these experts for the tokens that chose them, into outputs [T, k, hidden]. May be called with some
    // experts now and others later.
    void experts(const float* x, int64_t tokens, int64_t hidden, const int64_t* ids, int64_t k,
                 const std::vector<Expert>& ready, float* outputs);
    // Seconds to read a buffer once with all threads, and integer multiply-adds per second of all threads together.
    double time_read(const uint8_t* p, size_t n);
    double multiply_rate();

    // All chosen experts and their sum in rank order: y [T, hidden].
    void experts_all(const float* x, int64_t tokens, int64_t hidden, const int64_t* ids, const float* weights, int64_t k,
                     const std::vector<Expert>& ready, float* y);
    // y [T, hidden] = sum over ranks, in rank order.
    void combine(const float* outputs, const float* weights, int64_t tokens, int64_t k, int64_t hidden, float* y);

private:
    struct Buffer {
        std::unique_ptr<Block> block;
        size_t most = 0;  // asked for so far
    };
    // Grow-only scratch by number; poisoned before each use in tests.
    uint8_t* scratch(size_t which, size_t bytes);
    uint8_t* workspace(int worker) { return workspaces_[size_t(worker)]->data(); }
    Layout layout(const Matrix& m) const { return exact_ ? Layout::floats : k_->layout(m); }
    // One record per row of x in a layout; pointers into scratch, or into x itself for floats.
    const uint8_t* const* records(const float* x, int64_t tokens, int64_t cols, Layout layout, int group, size_t which);
    void rotate(const Rotation& r, const float* cos_sin, int64_t token, float* x) const;
    const float* angles(const Rotation& r, const std::vector<KvSpan>& spans, int64_t tokens);
    void attend(const AttendSpan& span, int64_t tokens);
    void append(const float* row, int64_t n, Dtype dtype, uint8_t* to) const;

    std::recursive_mutex busy_;
    int depth_ = 0;
    double seconds_ = 0;
    Pool pool_;
    const Kernels* k_;
    bool exact_, poison_;
    std::vector<std::unique_ptr<Block>> workspaces_;
    std::vector<Buffer> buffers_;
};

// The outermost call counts the time.
class Machine::Call {
public:
    explicit Call(Machine& machine) : machine_(machine), lock_(machine.busy_), start_(std::chrono::steady_clock::now()) {
        ++machine_.depth_;
    }
    ~Call() {
        if (--machine_.depth_ == 0)
            machine_.seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

private:
    Machine& machine_;
    std::lock_guard<std::recursive_mutex> lock_;
    std::chrono::steady_clock::time_point start_;
};

}  // namespace moeflux
