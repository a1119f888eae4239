#include "finite.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "../error.h"

namespace moeflux {

namespace {

constexpr int64_t kStep = 4096;  // values between two looks at the result

template <class T>
bool none_full(const uint8_t* p, int64_t bytes, T mask) {
    const int64_t n = bytes / int64_t(sizeof(T));
    for (int64_t start = 0; start < n; start += kStep) {
        const int64_t stop = std::min(n, start + kStep);
        T bad = 0;
        for (int64_t i = start; i < stop; ++i) {
            T value;
            std::memcpy(&value, p + i * int64_t(sizeof(T)), sizeof(T));
            bad = T(bad | T((value & mask) == mask));
        }
        if (bad) return false;
    }
    return true;
}

}  // namespace

Scalar scalar_of(std::string_view name) {
    if (name == "F32") return Scalar::f32;
    if (name == "BF16") return Scalar::bf16;
    if (name == "F16") return Scalar::f16;
    if (name == "F8_E4M3") return Scalar::f8;
    if (name == "U32") return Scalar::integer;
    throw Error(Error::Kind::format, "no component of an expert has type " + std::string(name));
}

int scalar_bytes(Scalar type) {
    if (type == Scalar::f8) return 1;
    return type == Scalar::bf16 || type == Scalar::f16 ? 2 : 4;
}

bool all_finite(Scalar type, const uint8_t* p, int64_t bytes) {
    switch (type) {
        case Scalar::f32: return none_full<uint32_t>(p, bytes, 0x7F800000u);
        case Scalar::bf16: return none_full<uint16_t>(p, bytes, 0x7F80u);
        case Scalar::f16: return none_full<uint16_t>(p, bytes, 0x7C00u);
        case Scalar::f8: return none_full<uint8_t>(p, bytes, 0x7Fu);
        case Scalar::integer: return true;
    }
    return true;
}

}  // namespace moeflux
