// Blocks over many tokens: cuts work into chunks for the pool and calls kernels on them. Owns threads and scratch; holds
// no weights and no state. One call at a time; a second caller waits.
//
// Nothing here changes a result: chunks are ranges of rows, heads, channels or tokens, and kernels compute each of those
// alike wherever the range begins and ends.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pool.h"
#include "process.h"

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

// One sequence's share of a batch and its state in this layer: rows [start, stop), position of the first row; blocks of keys
// and values or of latents (both the same), or convolution and delta.
struct Span {
    int64_t start, stop, position;
    uint8_t *const *first = nullptr, *const *second = nullptr;
    Dtype dtype = Dtype::f32;  // of what is in the blocks
    float *conv = nullptr, *delta = nullptr;
    bool decodes = false;  // or is part of a prompt: said by the caller, because the experts are kept accordingly

    // Row of a position in a table of blocks with so many bytes per row.
    static uint8_t* row(uint8_t* const* blocks, int64_t at, int64_t bytes) {
        return blocks[at / kStateBlock] + at % kStateBlock * bytes;
    }
};
using Spans = std::span<const Span>;

struct DeltaShape {
    int64_t key_heads, heads, key_dim, value_dim, width;
    int64_t channels() const { return 2 * key_heads * key_dim + heads * value_dim; }
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

using Experts = std::span<const Expert>;
using Matrices = std::span<const Matrix* const>;

// The expert that every token uses, and where its output goes: y [T, hidden].
struct SharedExpert {
    const Matrix *gate, *up, *down;
    const Matrix* output_gate;  // may be null
    float* y;
};

class Machine {
public:
    class Call;     // holds the machine for as long as it lives
    class Outside;  // while it lives, the thread that holds the machine is in code that is not ours: nothing may be run
    Machine(int threads, const Kernels* kernels, bool exact, bool poison);
    ~Machine();

    int threads() const { return pool_.size(); }
    const Kernels& kernels() const { return *k_; }
    double seconds() const { return seconds_.load(std::memory_order_relaxed); }  // spent in calls so far
    size_t scratch_bytes() const;                // asked for at most so far, all buffers together

    // Scratch for a block that is made of several calls: kFloats buffers, which those calls do not touch.
    static constexpr size_t kFloats = 14;
    float* floats(size_t which, int64_t n);
    void add(const float* a, const float* b, int64_t n, float* y);

    // y[i] = x W_i^T for several matrices with the same inputs. x [T, cols], y[i] [T, rows_i].
    void linears(const float* x, int64_t tokens, Matrices matrices, std::span<float* const> y);
    void linears(const float* x, int64_t tokens, std::initializer_list<const Matrix*> matrices, std::initializer_list<float*> y) {
        linears(x, tokens, Matrices(matrices.begin(), matrices.size()), std::span<float* const>(y.begin(), y.size()));
    }
    // What few tokens will be multiplied with after the next call, for threads that have nothing to do until then.
    void expect(Matrices matrices);
    void expect(std::initializer_list<const Matrix*> matrices) { expect(Matrices(matrices.begin(), matrices.size())); }
    void head_linear(const float* x, int64_t tokens, const HeadMatrix& w, float* y);
    void embed(const Matrix& table, const int64_t* ids, int64_t tokens, float* y);
    void rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* y);
    // sum = a + b, y = rms_norm(sum)
    void add_norm(const float* a, const float* b, const float* weight, float eps, int64_t rows, int64_t n, float* sum, float* y);
    void mlp(const float* x, int64_t tokens, const Matrix& gate, const Matrix& up, const Matrix& down,
             const Matrix* output_gate, float* y);

    // q [T, heads, dim or 2 dim], k and v [T, groups, dim] straight from the projections -> out [T, heads * dim].
    void attention(const float* q, const float* k, const float* v, const float* q_norm, const float* k_norm, float eps,
                   const AttentionShape& shape, const Rotation& rotation, Spans spans, float* out);
    // q_latent [T, heads, rank], q_rope [T, heads, rope] (stride q_stride), kv [T, rank + rope] -> out [T, heads, rank].
    void latent_attention(const float* q_latent, const float* q_rope, int64_t q_stride, const float* kv, const float* norm,
                          float eps, int64_t heads, int64_t rank, float scale, const Rotation& rotation,
                          Spans spans, float* out);
    // qkv [T, channels], z [T, heads, value_dim], a and b [T, heads] -> out [T, heads * value_dim].
    void delta_net(const float* qkv, const float* z, const float* a, const float* b, const float* conv, const float* a_log,
                   const float* dt_bias, const float* norm, float eps, const DeltaShape& shape,
                   Spans spans, float* out);

    // False where a score is not finite.
    bool route(float* logits, const float* bias, int64_t tokens, const RouterShape& shape, int64_t* ids, float* weights);
    // Outputs of these experts, which must differ, for the tokens that chose them, into outputs [T, k, hidden]; and of the
    // shared expert. May be called with some experts now and others later: `again`, if nothing but that call came before.
    // `then`: matrices that follow.
    void experts(const float* x, int64_t tokens, int64_t hidden, const int64_t* ids, int64_t k, Experts ready,
                 const SharedExpert* shared, float* outputs, Matrices then = {}, bool again = false);
    // Seconds to read a buffer once with all threads, and integer multiply-adds per second of all threads together.
    double time_read(const uint8_t* p, size_t n);
    double multiply_rate();

    // y [T, hidden] = sum over ranks, in rank order.
    void combine(const float* outputs, const float* weights, int64_t tokens, int64_t k, int64_t hidden, float* y);

private:
    struct Buffer {
        std::unique_ptr<Block> block;
        std::atomic<size_t> most = 0;  // asked for so far
    };
    // Grow-only scratch by number; poisoned before each use in tests.
    uint8_t* scratch(size_t which, size_t bytes);
    uint8_t* workspace(int worker) { return workspaces_[size_t(worker)]->data(); }
    Layout layout(const Matrix& m) const { return exact_ ? Layout::floats : k_->layout(m); }
    // One record per row of x in a layout; pointers into scratch, or into x itself for floats.
    const uint8_t* const* records(const float* x, int64_t tokens, int64_t cols, Layout layout, int group, size_t which);
    void rotate(const Rotation& r, const float* cos_sin, int64_t token, float* x) const;
    const float* angles(const Rotation& r, Spans spans, int64_t tokens);
    bool route_some(float* logits, const float* bias, int64_t first, int64_t last, const RouterShape&, float* work, int64_t* ids,
                    float* weights) const;
    // body(first, last, worker): tokens in shares among the threads, or all at once where they are few.
    template <class F>
    void over_tokens(int64_t tokens, F&& body) {
        if (tokens <= 16) return body(int64_t(0), tokens, 0);
        constexpr int64_t kShare = 8;
        pool_.run((tokens + kShare - 1) / kShare, [&](int64_t chunk, int worker) {
            body(chunk * kShare, std::min(tokens, (chunk + 1) * kShare), worker);
        });
    }
    void attend(const AttendSpan& span, int64_t tokens);
    void attend_one_token(const float* q, const float* k, const float* v, const float* q_norm, const float* k_norm, float eps,
                          const AttentionShape& s, const Rotation& rotation, Spans spans, float* out);
    struct Inner;
    class RecordKinds;
    int64_t group_pairs(const int64_t* ids, int64_t n, Experts ready);
    Inner lay_out(int64_t from, Experts ready, int64_t tokens, const SharedExpert* shared);
    void run_turn(const Inner& in, int64_t hidden, int64_t k, float* outputs, Matrices then);
    void add_gates_and_ups(const Inner& in, RecordKinds& kinds, int64_t k);
    void add_downs(const Inner& in);
    void activate(const Inner& in);
    void append(const float* row, int64_t n, Dtype dtype, uint8_t* to) const;

    // One product of a job: all rows of a matrix for some tokens, cut into chunks of rows.
    struct Piece {
        const Matrix* matrix;
        Layout layout;
        const uint8_t* const* in;  // records of the tokens
        float* const* out;
        int64_t tokens, per_chunk, first_chunk;
    };
    void add_piece(const Matrix& m, Layout layout, const uint8_t* const* in, float* const* out, int64_t tokens, int64_t most_tokens);
    const Piece& piece_of(int64_t chunk) const;
    void run_pieces();  // all that were added, as one job
    void expect_pieces();  // those that were added are not run yet: the next job

    std::recursive_mutex busy_;
    int depth_ = 0;
    bool outside_ = false;
    std::atomic<double> seconds_ = 0;
    const Process process_;
    Pool pool_;
    const Kernels* k_;
    bool exact_, poison_;
    std::vector<std::unique_ptr<Block>> workspaces_;
    std::vector<Buffer> buffers_;
    std::unique_ptr<RecordKinds> inputs_;  // of the experts that were called last
    std::vector<Piece> pieces_;
    int64_t chunks_ = 0;  // of all pieces
    std::vector<int64_t> pairs_, shares_, place_;  // of `experts`
};

// The outermost call counts the time, and finds nothing of a call before it that failed. Throws Error of kind `state` in a child
// of fork(), and where the same thread is in the middle of another call (see Outside).
class Machine::Call {
public:
    explicit Call(Machine& machine) : machine_(machine), lock_(lock(machine)), start_(std::chrono::steady_clock::now()) {
        if (machine_.depth_++ > 0) return;
        machine_.pieces_.clear();
        machine_.chunks_ = 0;
    }
    ~Call() {
        if (--machine_.depth_ > 0) return;
        const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
        machine_.seconds_.store(machine_.seconds() + took, std::memory_order_relaxed);
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

private:
    using Lock = std::unique_lock<std::recursive_mutex>;
    static Lock lock(Machine& machine) {
        machine.process_.check("the machine");
        Lock lock(machine.busy_);
        if (machine.outside_) throw Error(Error::Kind::state, "the machine is in the middle of another call of this thread");
        return lock;
    }
    Machine& machine_;
    Lock lock_;
    std::chrono::steady_clock::time_point start_;
};

class Machine::Outside {
public:
    explicit Outside(Machine& machine) : machine_(machine) { machine_.outside_ = true; }
    ~Outside() { machine_.outside_ = false; }
    Outside(const Outside&) = delete;
    Outside& operator=(const Outside&) = delete;

private:
    Machine& machine_;
};

}  // namespace moeflux
