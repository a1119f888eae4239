#include "nucleus.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

namespace moeflux {

namespace {

constexpr int64_t kSorted = 2048;  // few enough to sort

constexpr int64_t kStretch = 512;

}  // namespace

// Halves the range in which the bound lies; what is above is summed, what is outside is dropped. The bits of floats that are
// not negative are in the order of their values, so the middle between two patterns halves any range in 31 steps.
Nucleus find_nucleus(const Kernels& k, const float* weights, int64_t n, double share, float* pool) {
    int64_t all = 0;
    const double total = k.sum_from(weights, n, 0, &all), wanted = share * total;
    const float least = float((1 - share) * total / double(n));  // all that are below hold less than what is left out
    double above = 0;      // mass and count of what is certainly inside
    int64_t n_above = 0;
    uint32_t low = std::bit_cast<uint32_t>(least), high = std::bit_cast<uint32_t>(INFINITY);  // the bound: from low to below high
    const float* x = weights;
    while (n > kSorted && high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        int64_t count = 0;
        const double mass = k.sum_from(x, n, std::bit_cast<float>(middle), &count);
        if (count == n || (count > 0 && above + mass >= wanted)) {
            low = middle;
        } else {
            high = middle;
            above += mass;
            n_above += count;
        }
        if (count == 0 || count == n) continue;  // nothing to drop
        n = k.between(x, n, std::bit_cast<float>(low), std::bit_cast<float>(high), pool);
        x = pool;
    }
    if (high - low == 1) {  // all the same
        const double needed = std::ceil((wanted - above) / std::bit_cast<float>(low));
        return {std::bit_cast<float>(low), n_above + int64_t(std::clamp(needed, 1.0, double(n)))};
    }
    if (x != pool) std::copy(x, x + n, pool);
    std::sort(pool, pool + n, std::greater<float>());
    int64_t i = 0;
    for (double sum = above + pool[0]; sum < wanted && i + 1 < n && pool[i + 1] > 0; sum += pool[i]) ++i;
    return {pool[i], n_above + i + 1};
}

// Stretches first, then inside one: a running sum over the whole vocabulary would be slow.
int64_t draw_weight(const Kernels& k, float* weights, int64_t n, float bound, int64_t count, double point) {
    int64_t some = 0;
    double total = k.sum_from(weights, n, bound, &some);
    for (int64_t i = n - 1, surplus = count < 0 ? 0 : some - count; i >= 0 && surplus > 0; --i)
        if (weights[i] == bound) {
            total -= bound;
            weights[i] = 0;
            --surplus;
        }
    if (!(bound > 0)) bound = std::numeric_limits<float>::denorm_min();  // what weighs nothing is never drawn
    const double wanted = point * total;
    double before = 0, sum = 0;  // in front of the stretch; in front of the weight
    int64_t last = 0;            // the last stretch that holds something
    for (int64_t i = 0; i < n; i += kStretch) {
        const int64_t end = std::min(n, i + kStretch);
        const double mass = k.sum_from(weights + i, end - i, bound, &some);
        if (some == 0) continue;
        last = i;
        sum = before;
        before += mass;
        if (before > wanted) break;
    }
    int64_t at = last;
    for (int64_t i = last; i < std::min(n, last + kStretch); ++i) {
        if (weights[i] < bound) continue;
        at = i;  // stays there if rounding put the point behind all of them
        sum += weights[i];
        if (sum > wanted) break;
    }
    return at;
}

}  // namespace moeflux
