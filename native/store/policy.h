// Which expert goes when a slot is needed: a choice among the oldest that may go at all. What may go is Residency's business.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

namespace moeflux {

class Policy {
public:
    virtual ~Policy() = default;
    // How many of the oldest candidates it wants to see.
    virtual int window() const = 0;
    // The index of the one that goes. Keys are layer * n_experts + expert, oldest first, at least one.
    virtual int choose(const int* keys, int n) const = 0;
    // An expert was asked for, in the token with this number, which never goes back.
    virtual void used(int key, int64_t token) = 0;
    // How likely it is asked for again soon, against others.
    virtual double warmth(int key) const = 0;
};

// "lru": the oldest; warm is what was asked for last. "lfru": of the oldest 32, the one that was asked for least often, where
// old requests count ever less; warm is what was asked for often of late.
// Throws Error of kind `option` for another name.
std::unique_ptr<Policy> make_policy(std::string_view name, int n_keys, int n_slots);

constexpr int kMaxWindow = 32;

}  // namespace moeflux
