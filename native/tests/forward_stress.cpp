// Several threads that run forwards of a tiny model on one machine, one stream and one store, for the sanitizers: steps and
// prompts, runs that are cancelled from another thread, numbers that are read meanwhile, and closing in the middle of it.
// What is not cancelled is compared bit for bit with a run alone, on one thread and with every expert in memory.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>

#include "../stream.h"

using namespace moeflux;

namespace {

constexpr int kLayers = 3, kExperts = 8, kChosen = 2, kGroup = 32;
constexpr int64_t kHidden = 64, kWidth = 32, kHeads = 2, kGroups = 1, kDim = 32, kPrompt = 20, kSteps = 5;

void fail(const char* what) {
    std::fprintf(stderr, "forward_stress: %s\n", what);
    std::abort();
}

std::vector<float> numbers(uint32_t seed, int64_t n, float size) {
    std::mt19937 random(seed);
    std::vector<float> values(static_cast<size_t>(n));
    for (float& value : values) value = (float(random() % 2001) / 1000.0f - 1.0f) * size;
    return values;
}

struct Model {
    std::vector<std::vector<float>> weights;
    std::vector<Layer> layers;
    std::vector<ExpertLayer> experts;

    const float* vector(int64_t n, float size) {
        weights.push_back(numbers(uint32_t(weights.size()), n, size));
        return weights.back().data();
    }
    Matrix matrix(int64_t rows, int64_t cols) {
        Matrix m;
        m.rows = rows;
        m.cols = cols;
        m.weight = reinterpret_cast<const uint8_t*>(vector(rows * cols, 0.2f));
        return m;
    }
    Layer layer() {
        Layer l;
        l.hidden = kHidden;
        l.eps = 1e-6f;
        l.mixer_norm = vector(kHidden, 1);
        l.ffn_norm = vector(kHidden, 1);
        l.q_norm = vector(kDim, 1);
        l.k_norm = vector(kDim, 1);
        l.q = matrix(kHeads * kDim, kHidden);
        l.k = matrix(kGroups * kDim, kHidden);
        l.v = matrix(kGroups * kDim, kHidden);
        l.o = matrix(kHidden, kHeads * kDim);
        l.shape = {kHeads, kGroups, kDim, false};
        l.rotation.frequencies = {1.0, 0.1};
        l.router = matrix(kExperts, kHidden);
        l.routing = {false, kExperts, kChosen, 1, 1, true, 1.0f};
        return l;
    }
    explicit Model(const std::string& path) {
        std::ofstream file(path, std::ios::binary);
        int64_t at = 0;
        for (int i = 0; i < kLayers; ++i) {
            layers.push_back(layer());
            experts.push_back({kExperts, {}, {}, {}, {}});
            add(file, at, "gate", kWidth, kHidden, experts.back().gate);
            add(file, at, "up", kWidth, kHidden, experts.back().up);
            add(file, at, "down", kHidden, kWidth, experts.back().down);
        }
    }
    // 4-bit weights with their scales and biases, of all experts.
    void add(std::ofstream& file, int64_t& at, const char* name, int64_t rows, int64_t cols, ExpertMatrix& m) {
        m.shape.codec = Codec::affine;
        m.shape.rows = rows;
        m.shape.cols = cols;
        m.shape.bits = 4;
        m.shape.group = kGroup;
        auto& components = experts.back().components;
        Part* parts[] = {&m.weight, &m.scales, &m.biases};
        for (int c = 0; c < 3; ++c) {
            const int64_t n = c == 0 ? rows * cols / 8 : rows * (cols / kGroup);  // of four bytes
            *parts[c] = {int(components.size()), 0};
            components.push_back({name, c == 0 ? "weight" : "scales", c == 0 ? Scalar::integer : Scalar::f32, n * 4, {}, false});
            for (int e = 0; e < kExperts; ++e) {
                const auto values = numbers(uint32_t(at), n, 0.05f);
                file.write(reinterpret_cast<const char*>(values.data()), std::streamsize(values.size() * 4));
                components.back().extents.push_back({0, at, n * 4});
                at += n * 4;
            }
        }
    }
};

// One sequence with a block of keys and one of values per layer.
class Sequence {
public:
    explicit Sequence(const Model& model) : model_(model), blocks_(2 * kLayers, std::vector<uint8_t>(kStateBlock * kGroups * kDim * 4)) {
        for (auto& block : blocks_) tables_.push_back(block.data());
    }
    // The last row of what comes out.
    std::vector<float> forward(Stream& stream, std::vector<float> x, const CancelFlag* cancel = nullptr) {
        const int64_t tokens = int64_t(x.size()) / kHidden;
        std::vector<Span> spans;
        std::vector<Step> steps;
        for (size_t i = 0; i < kLayers; ++i) {
            spans.push_back({0, tokens, length_, &tables_[2 * i], &tables_[2 * i + 1]});
            spans.back().decodes = tokens == 1;
        }
        for (size_t i = 0; i < kLayers; ++i) steps.push_back({&model_.layers[i], Spans(&spans[i], 1)});
        Listener listener(cancel);
        const Stream::Run run(stream, steps, listener);
        if (run_layers(stream.machine(), steps, x.data(), tokens, stream) >= 0) fail("scores are not finite");
        length_ += tokens;
        return {x.end() - kHidden, x.end()};
    }

private:
    const Model& model_;
    std::vector<std::vector<uint8_t>> blocks_;
    std::vector<uint8_t*> tables_;
    int64_t length_ = 0;
};

std::vector<std::vector<float>> run(const Model& model, Stream& stream, uint32_t seed, const CancelFlag* cancel = nullptr) {
    Sequence sequence(model);
    std::vector<std::vector<float>> rows = {sequence.forward(stream, numbers(seed, kPrompt * kHidden, 1), cancel)};
    for (uint32_t step = 0; step < kSteps; ++step)
        rows.push_back(sequence.forward(stream, numbers(seed * 100 + step, kHidden, 1), cancel));
    return rows;
}

struct Counts {
    std::atomic<int> right{0}, cancelled{0}, closed{0};
};

using Rows = std::vector<std::vector<float>>;

void work(const Model& model, Stream& stream, uint32_t seed, const Rows& expected, int rounds, CancelFlag* cancel, Counts& counts) {
    for (int i = 0; i < rounds; ++i) {
        try {
            if (run(model, stream, seed, i % 3 == 0 ? cancel : nullptr) != expected) fail("other bits than alone");
            ++counts.right;
        } catch (const Error& error) {
            if (error.kind == Error::Kind::closed) {
                ++counts.closed;
                return;
            }
            if (error.kind != Error::Kind::cancelled) fail(error.what());
            ++counts.cancelled;
        }
    }
}

void stress(const Model& model, const std::vector<Rows>& expected, StoreOptions options, int threads, bool close_early) {
    Machine machine(threads, generic_kernels(), false, false);
    const auto store = Store::open(options);
    Stream stream(store, machine, {true, true, 4});
    CancelFlag cancel;
    Counts counts;
    std::vector<std::thread> callers;
    for (uint32_t t = 0; t < expected.size(); ++t)
        callers.emplace_back([&, t] { work(model, stream, t, expected[t], 9, &cancel, counts); });
    std::atomic<bool> done{false};
    std::thread watcher([&] {
        while (!done) {
            cancel.set();
            if (machine.seconds() < 0 || store->stats().reads < 0 || machine.scratch_bytes() > (1u << 30)) fail("numbers");
            cancel.clear();
            std::this_thread::sleep_for(std::chrono::microseconds(300));
        }
    });
    if (close_early) {
        std::this_thread::sleep_for(std::chrono::milliseconds(8));
        store->close();
    }
    for (std::thread& caller : callers) caller.join();
    done = true;
    watcher.join();
    if (!close_early && counts.right < 6 * int(expected.size())) fail("too few runs came to their end");
    std::printf("slots %d threads %d: %d right, %d cancelled, %d closed\n", options.n_slots, threads, counts.right.load(),
                counts.cancelled.load(), counts.closed.load());
}

}  // namespace

int main(int argc, char** argv) {
    const std::string path = argc > 1 ? argv[1] : "/tmp/forward_stress.bin";
    const Model model(path);
    StoreOptions options;
    options.layers = model.experts;
    options.paths = {path};
    options.n_readers = 2;
    options.sweep_slots = 2;
    options.n_slots = kLayers * kExperts;
    std::vector<Rows> expected;
    {
        Machine machine(1, generic_kernels(), false, false);
        Stream stream(Store::open(options), machine, {false, false, 4});
        for (uint32_t seed = 0; seed < 3; ++seed) expected.push_back(run(model, stream, seed));
    }
    for (const int slots : {4, kLayers * kExperts})
        for (const int threads : {1, 3})
            for (const bool close_early : {false, true}) {
                options.n_slots = slots;
                stress(model, expected, options, threads, close_early);
            }
    unlink(path.c_str());
    return 0;
}
