// Many threads on one store, for the sanitizers: leases, sweeps, hints, tokens, files that end early, and closing in the
// middle of it. Every lease's bytes are checked against what the file must hold, when handed out and again at the release.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>

#include "../store/store.h"

using namespace moeflux;

namespace {

constexpr int kLayers = 3, kExperts = 12;
constexpr int64_t kSizes[] = {150000, 131072, 4100, 64};  // two in place where reads are direct, two copied
constexpr int kComponents = 4;

uint8_t byte_of(int layer, int expert, int component, int64_t i) {
    return uint8_t((uint32_t(i) * 31 + uint32_t(layer * 131 + expert * 17 + component * 7)) % 0x70);  // finite as bf16
}

void fail(const char* what) {
    std::fprintf(stderr, "store_stress: %s\n", what);
    std::abort();
}

void keep_small(std::vector<ExpertLayer>& layers, bool kept) {
    for (ExpertLayer& layer : layers)
        for (size_t c = 2; c < layer.components.size(); ++c) layer.components[c].kept = kept;
}

std::vector<ExpertLayer> write_file(const std::string& path) {
    std::vector<ExpertLayer> layers(kLayers + 1);  // layer 0 has none
    std::ofstream file(path, std::ios::binary);
    int64_t at = 0;
    for (int layer = 1; layer <= kLayers; ++layer) {
        ExpertLayer& of = layers[size_t(layer)];
        of.n_experts = kExperts;
        of.components.resize(kComponents);
        for (int c = 0; c < kComponents; ++c) {
            of.components[size_t(c)] = {"gate", "weight", Scalar::bf16, kSizes[c], {}, false};
            for (int expert = 0; expert < kExperts; ++expert) {
                const int64_t gap = (layer + expert + c) % 5;
                file << std::string(size_t(gap), '\xff');
                of.components[size_t(c)].extents.push_back({0, at + gap, kSizes[c]});
                for (int64_t i = 0; i < kSizes[c]; ++i) file.put(char(byte_of(layer, expert, c, i)));
                at += gap + kSizes[c];
            }
        }
        Matrix shape;
        shape.rows = 8;
        shape.cols = 4;
        shape.dtype = Dtype::bf16;
        of.gate = of.up = of.down = {shape, {0, 0}, {}, {}};
        std::swap(of.down.shape.rows, of.down.shape.cols);
    }
    return layers;
}

void check(const Lease& lease, int layer, const Expert& expert) {
    if (expert.gate->weight != lease.bytes(expert.id, 0)) fail("a matrix that looks elsewhere");
    for (int c = 0; c < kComponents; ++c) {
        const uint8_t* bytes = lease.bytes(expert.id, c);
        for (int64_t i = 0; i < kSizes[c]; i += c < 2 ? 61 : 1)
            if (bytes[i] != byte_of(layer, int(expert.id), c, i)) fail("wrong bytes in a lease");
    }
}

// One lease of random experts from beginning to end.
void use(Store& store, std::mt19937& random, std::atomic<int64_t>& checked) {
    const auto any = [&](int n) { return int(random() % uint32_t(n)); };
    const int layer = 1 + any(kLayers);
    const bool sweep = any(4) == 0;
    std::vector<int64_t> ids(size_t(sweep ? kExperts : 1 + any(3)));
    for (int64_t& id : ids) id = any(kExperts);
    Lease lease = store.acquire(layer, ids.data(), int64_t(ids.size()), sweep ? any(int(ids.size()) + 1) : 0);
    if (any(6) == 0) return;  // given up before anything came
    if (any(3) == 0) store.hint(1 + layer % kLayers, ids.data(), int64_t(ids.size()), sweep);
    std::vector<Expert> ready, all;
    while (lease.next(ready)) {
        for (const Expert& expert : ready) check(lease, layer, expert);
        checked += int64_t(ready.size());
        if (sweep)
            lease.release(ready);
        else
            all.insert(all.end(), ready.begin(), ready.end());
    }
    for (const Expert& expert : all) check(lease, layer, expert);
    if (any(2)) store.next_token();
}

void work(Store& store, uint32_t seed, int rounds, std::atomic<int64_t>& checked, std::atomic<int64_t>& errors) {
    std::mt19937 random(seed);
    for (int i = 0; i < rounds; ++i) {
        try {
            use(store, random, checked);
        } catch (const Error& error) {
            ++errors;
            if (error.kind == Error::Kind::closed) return;
            if (error.kind == Error::Kind::full && !store.closed() && store.stats().slots > 40) fail("full");
        }
    }
}

void run(const StoreOptions& options, uint32_t seed, int rounds, bool close_early, bool expect_errors) {
    const auto store = Store::open(options);
    std::atomic<int64_t> checked{0}, errors{0};
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < 4; ++t)
        threads.emplace_back([&, t] { work(*store, seed * 100 + t, rounds, checked, errors); });
    if (close_early) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        store->close();
    }
    for (std::thread& thread : threads) thread.join();
    const StoreStats s = store->stats();
    if (s.asked != s.hits + s.late + s.joined + s.misses) fail("asked does not add up");
    if (s.hints_unused < 0) fail("hints do not add up");
    if (!close_early && !expect_errors && checked == 0) fail("nothing was checked");
    if (expect_errors && s.errors == 0) fail("a file that ends early went unnoticed");
    if (!close_early && !expect_errors && s.errors) fail("a good file failed");
    for (const auto& slot : store->slots())
        if (slot.pins) fail("a slot is still leased");
    std::printf("slots %d direct %d readers %d: %lld experts checked, %lld errors, %lld evictions, %lld hints useful\n",
                options.n_slots, options.direct, options.n_readers, (long long)checked, (long long)errors, (long long)s.evictions,
                (long long)s.hints_useful);
}

}  // namespace

int main(int argc, char** argv) {
    const std::string path = argc > 1 ? argv[1] : "/tmp/store_stress.bin";
    const int rounds = argc > 2 ? std::atoi(argv[2]) : 150;
    StoreOptions options;
    options.layers = write_file(path);
    options.paths = {path};
    options.sweep_slots = 3;
    uint32_t seed = 1;
    for (const bool direct : {false, true})
        for (const int n_slots : {9, 17, 64}) {
            options.direct = direct;
            options.n_slots = n_slots;
            options.floor = n_slots / 12;
            options.n_readers = 1 + int(seed % 4);
            options.policy = seed % 2 ? "lru" : "lfru";
            keep_small(options.layers, n_slots == 17);
            options.under_way = n_slots == 64 ? 0 : 200000;
            run(options, seed++, rounds, false, false);
            for (int i = 0; i < 5; ++i) {
                keep_small(options.layers, i % 2);
                run(options, seed++, rounds, true, false);
            }
        }
    if (truncate(path.c_str(), 7000000)) fail("truncate");
    for (const bool kept : {false, true}) {
        keep_small(options.layers, kept);
        run(options, seed++, rounds, false, true);
    }
    unlink(path.c_str());
    return 0;
}
