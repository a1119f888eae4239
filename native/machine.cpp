#include "machine.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "buffers.h"

namespace moeflux {

namespace {

constexpr int64_t kFewTokens = 4;
constexpr int64_t kStreamBytes = 64 << 10;  // of codes, that one thread reads at a time
constexpr size_t kRecordsBytes = 512 << 10;  // that stay in the second-level cache while the rows of a matrix pass by
constexpr size_t kExpectBytes = 384 << 10;  // of codes, that an idle thread brings into its cache

// Rows per chunk: whole tiles of the kernels, long enough to stream, short enough that the threads end together.
int64_t rows_per_chunk(const Matrix& m, int64_t tokens, int threads) {
    const int64_t tile = tokens <= kFewTokens ? 16 : 64, bytes = tokens <= kFewTokens ? kStreamBytes : 128 << 10;
    const int64_t wanted = bytes / int64_t(row_bytes(m)) / tile * tile;
    const int64_t most = ceil_div(m.rows, 4 * threads) / tile * tile;
    return std::max(tile, std::min(wanted, most));
}

// Tokens whose records stay in the cache, and enough of them that unpacking rows again for the next ones costs little.
int64_t tokens_per_pass(const Matrix& m, Layout layout) {
    return std::clamp<int64_t>(int64_t(kRecordsBytes / record_bytes(layout, m.cols, m.group)), 48, kMostTokens);
}

}  // namespace

Machine::Machine(int threads, const Kernels* kernels, bool exact, bool poison)
    : pool_(threads), k_(kernels), exact_(exact), poison_(poison), buffers_(kBuffers), inputs_(std::make_unique<RecordKinds>(*this)) {
    for (int i = 0; i < threads; ++i) workspaces_.push_back(std::make_unique<Block>(k_->workspace_bytes()));
}

Machine::~Machine() = default;

uint8_t* Machine::scratch(size_t which, size_t bytes) {
    auto& block = buffers_[which].block;
    if (bytes > buffers_[which].most) buffers_[which].most = bytes;
    if (!block || block->size() < bytes) {
        block.reset();
        block = std::make_unique<Block>(bytes + bytes / 4 + 64);
    }
    if (poison_) std::memset(block->data(), 0xFF, block->size());  // as floats, NaN
    return block->data();
}

size_t Machine::scratch_bytes() const {
    size_t total = 0;
    for (const Buffer& buffer : buffers_) total += buffer.most;
    return total;
}

float* Machine::floats(size_t which, int64_t n) { return reinterpret_cast<float*>(scratch(kFloatBuffers + which, size_t(n) * 4)); }

void Machine::add(const float* a, const float* b, int64_t n, float* y) {
    const Call call(*this);
    constexpr int64_t kPiece = 4096;
    over_tokens(ceil_div(n, kPiece), [&](int64_t first, int64_t last, int) {
        const int64_t begin = first * kPiece;
        k_->add(a + begin, b + begin, std::min(n, last * kPiece) - begin, y + begin);
    });
}

const uint8_t* const* Machine::records(const float* x, int64_t tokens, int64_t cols, Layout layout, int group, size_t which) {
    const size_t bytes = record_bytes(layout, cols, group);
    const size_t pointer_bytes = size_t(tokens) * sizeof(uint8_t*);
    const size_t data_at = (pointer_bytes + 63) / 64 * 64;
    uint8_t* base = scratch(which, data_at + (layout == Layout::floats ? 0 : size_t(tokens) * bytes));
    auto** pointers = reinterpret_cast<const uint8_t**>(base);
    if (layout == Layout::floats) {
        for (int64_t t = 0; t < tokens; ++t) pointers[t] = reinterpret_cast<const uint8_t*>(x + t * cols);
        return pointers;
    }
    for (int64_t t = 0; t < tokens; ++t) pointers[t] = base + data_at + size_t(t) * bytes;
    const int64_t per_chunk = tokens > 8 ? 4 : tokens;
    pool_.run(ceil_div(tokens, per_chunk), [&](int64_t chunk, int) {
        const int64_t end = std::min(tokens, (chunk + 1) * per_chunk);
        for (int64_t t = chunk * per_chunk; t < end; ++t)
            k_->quantize(x + t * cols, cols, group, layout, base + data_at + size_t(t) * bytes);
    });
    return pointers;
}

void Machine::add_piece(const Matrix& m, Layout layout, const uint8_t* const* in, float* const* out, int64_t tokens,
                        int64_t most_tokens) {
    const int64_t per_chunk = rows_per_chunk(m, most_tokens, threads());
    in_turns(tokens, tokens_per_pass(m, layout), [&](int64_t t, int64_t n) {
        pieces_.push_back({&m, layout, in + t, out + t, n, per_chunk, chunks_});
        chunks_ += ceil_div(m.rows, per_chunk);
    });
}

const Machine::Piece& Machine::piece_of(int64_t chunk) const {
    const auto after = std::upper_bound(pieces_.begin(), pieces_.end(), chunk,
                                        [](int64_t c, const Piece& piece) { return c < piece.first_chunk; });
    return *(after - 1);
}

void Machine::run_pieces() {
    pool_.run_ahead(chunks_, [&](int64_t chunk, int64_t after, int worker) {
        const Piece& piece = piece_of(chunk);
        const int64_t first = (chunk - piece.first_chunk) * piece.per_chunk;
        const int64_t last = std::min(piece.matrix->rows, first + piece.per_chunk);
        Next next;
        if (after >= 0) {
            const Piece& other = piece_of(after);
            if (other.layout == piece.layout) next = {other.matrix, (after - other.first_chunk) * other.per_chunk};
        }
        k_->rows(*piece.matrix, piece.layout, piece.in, piece.tokens, piece.out, first, last, next, workspace(worker));
    });
    pieces_.clear();
    chunks_ = 0;
}

void Machine::expect_pieces() {
    for (int worker = 0; worker < threads() && chunks_ > 0; ++worker) {
        const int64_t chunk = pool_.share(chunks_, worker);
        const Piece& piece = piece_of(chunk);
        const Matrix& m = *piece.matrix;
        const int64_t first = (chunk - piece.first_chunk) * piece.per_chunk;
        const int64_t rows = std::min(m.rows - first, int64_t(kExpectBytes / row_bytes(m)) + 1);
        pool_.expect(worker, 0, m.weight + size_t(first) * row_bytes(m), size_t(rows) * row_bytes(m));
        const size_t scales = m.codec == Codec::affine ? size_t(m.cols / m.group) * (m.dtype == Dtype::f32 ? 4 : 2) : 0;
        pool_.expect(worker, 1, scales ? m.scales + size_t(first) * scales : nullptr, size_t(rows) * scales);
        pool_.expect(worker, 2, scales ? m.biases + size_t(first) * scales : nullptr, size_t(rows) * scales);
    }
    pieces_.clear();
    chunks_ = 0;
}

void Machine::expect(Matrices matrices) {
    const Call call(*this);
    for (const Matrix* m : matrices)
        if (m->rows) add_piece(*m, Layout::floats, nullptr, nullptr, 1, 1);
    expect_pieces();
}

void Machine::linears(const float* x, int64_t tokens, Matrices matrices, std::span<float* const> y) {
    const Call call(*this);
    const size_t n = matrices.size();
    auto** pointers = reinterpret_cast<float**>(scratch(kPointers, n * size_t(tokens) * sizeof(float*)));
    RecordKinds kinds(*this, x, tokens);
    for (size_t i = 0; i < n; ++i) {
        const Matrix& m = *matrices[i];
        float** out = pointers + i * size_t(tokens);
        for (int64_t t = 0; t < tokens; ++t) out[t] = y[i] + t * m.rows;
        add_piece(m, layout(m), kinds.of(m), out, tokens, tokens);
    }
    run_pieces();
}

void Machine::head_linear(const float* x, int64_t tokens, const HeadMatrix& w, float* y) {
    const Call call(*this);
    const int64_t cols = w.matrix.cols;
    const int64_t n_in = w.transposed ? w.rows : cols, n_out = w.transposed ? cols : w.rows;
    pool_.run(w.heads, [&](int64_t h, int worker) {
        float* row = reinterpret_cast<float*>(workspace(worker));
        if (w.transposed)
            for (int64_t t = 0; t < tokens; ++t) std::memset(y + (t * w.heads + h) * n_out, 0, size_t(n_out) * 4);
        for (int64_t r = 0; r < w.rows; ++r) {
            k_->decode_row(w.matrix, h * w.stride + w.first + r, row);
            for (int64_t t = 0; t < tokens; ++t) {
                const float* in = x + (t * w.heads + h) * n_in;
                float* out = y + (t * w.heads + h) * n_out;
                if (w.transposed) k_->axpy(in[r], row, cols, out);
                else out[r] = k_->dot(row, in, cols);
            }
        }
    });
}

void Machine::embed(const Matrix& table, const int64_t* ids, int64_t tokens, float* y) {
    const Call call(*this);
    over_tokens(tokens, [&](int64_t first, int64_t last, int) {
        for (int64_t t = first; t < last; ++t) k_->decode_row(table, ids[t], y + t * table.cols);
    });
}

void Machine::rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* y) {
    const Call call(*this);
    over_tokens(rows, [&](int64_t first, int64_t last, int) {
        for (int64_t r = first; r < last; ++r) k_->rms_norm(x + r * n, weight, eps, n, y + r * n);
    });
}

void Machine::add_norm(const float* a, const float* b, const float* weight, float eps, int64_t rows, int64_t n, float* sum,
                       float* y) {
    const Call call(*this);
    over_tokens(rows, [&](int64_t first, int64_t last, int) {
        for (int64_t r = first; r < last; ++r) {
            k_->add(a + r * n, b + r * n, n, sum + r * n);
            k_->rms_norm(sum + r * n, weight, eps, n, y + r * n);
        }
    });
}

void Machine::mlp(const float* x, int64_t tokens, const Matrix& gate, const Matrix& up, const Matrix& down,
                  const Matrix* output_gate, float* y) {
    const SharedExpert all = {&gate, &up, &down, output_gate, y};
    experts(x, tokens, down.rows, nullptr, 0, {}, &all, nullptr);
}

double Machine::time_read(const uint8_t* p, size_t n) {
    const Call call(*this);
    constexpr size_t kPiece = size_t(1) << 20;
    std::vector<uint64_t> sums(size_t(threads()) * 8);
    const auto start = std::chrono::steady_clock::now();
    pool_.run(int64_t((n + kPiece - 1) / kPiece), [&](int64_t chunk, int worker) {
        const size_t first = size_t(chunk) * kPiece;
        sums[size_t(worker) * 8] ^= k_->read_all(p + first, std::min(kPiece, n - first));
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double Machine::multiply_rate() {
    const Call call(*this);
    constexpr int64_t kRounds = 200000;
    const int64_t chunks = 4 * threads();
    std::vector<int64_t> done(size_t(threads()) * 8);
    const auto start = std::chrono::steady_clock::now();
    pool_.run(chunks, [&](int64_t, int worker) { done[size_t(worker) * 8] += kRounds * k_->multiply_only(kRounds); });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    int64_t total = 0;
    for (int64_t n : done) total += n;
    return double(total) / seconds;
}

}  // namespace moeflux
