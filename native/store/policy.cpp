#include "policy.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "../error.h"

namespace moeflux {

namespace {

class Lru final : public Policy {
public:
    explicit Lru(int n_keys) : last_(size_t(n_keys)) {}

    int window() const override { return 1; }
    int choose(const int*, int) const override { return 0; }
    void used(int key, int64_t token) override { last_[size_t(key)] = token; }
    double warmth(int key) const override { return double(last_[size_t(key)]); }

private:
    std::vector<int64_t> last_;
};

// The sum of 2^(token / kHalfLife) over all requests, as its logarithm: requests count half as much after so many tokens,
// and yet two experts can be compared at any time without touching the others.
class Warmth {
public:
    explicit Warmth(int n_keys) : sums_(size_t(n_keys), kNever) {}

    double of(int key) const { return sums_[size_t(key)]; }
    void add(int key, int64_t token) {
        double& sum = sums_[size_t(key)];
        const double now = double(token) / kHalfLife;
        sum = std::max(sum, now) + std::log2(1.0 + std::exp2(-std::abs(sum - now)));
    }

private:
    static constexpr double kHalfLife = 4;  // text of one topic wants less, texts of many more
    static constexpr double kNever = -1e300;
    std::vector<double> sums_;
};

class Lfru final : public Policy {
public:
    Lfru(int n_keys, int n_slots)
        : window_(std::clamp(n_slots / 4, 1, kMaxWindow)), period_(int64_t(n_slots) * 8), counts_(size_t(n_keys)), warmth_(n_keys) {}

    int window() const override { return window_; }

    int choose(const int* keys, int n) const override {
        int best = 0;
        for (int i = 1; i < n; ++i)
            if (counts_[size_t(keys[i])] < counts_[size_t(keys[best])]) best = i;
        return best;
    }

    void used(int key, int64_t token) override {
        warmth_.add(key, token);
        uint16_t& count = counts_[size_t(key)];
        count = uint16_t(std::min<int>(count + 2, UINT16_MAX));  // by two, so that one request survives one halving
        if (++uses_ % period_ == 0)
            for (uint16_t& c : counts_) c = uint16_t(c / 2);
    }

    double warmth(int key) const override { return warmth_.of(key); }

private:
    int window_;
    int64_t period_, uses_ = 0;  // in requests: as long as it takes to turn the memory over a few times
    std::vector<uint16_t> counts_;  // this and warmth are kept for experts that are not in memory too
    Warmth warmth_;
};

}  // namespace

std::unique_ptr<Policy> make_policy(std::string_view name, int n_keys, int n_slots) {
    if (name == "lru") return std::make_unique<Lru>(n_keys);
    if (name == "lfru") return std::make_unique<Lfru>(n_keys, n_slots);
    throw Error(Error::Kind::option, "unknown policy " + std::string(name), "option 'policy'", "lru or lfru");
}

}  // namespace moeflux
