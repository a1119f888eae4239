// What can go wrong, as one exception that carries what a person needs to know. Python sees the class of moeflux.core.errors
// that belongs to its kind (py_errors.cpp).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace moeflux {

class Error : public std::runtime_error {
public:
    enum class Kind : int { read, format, closed, full, cancelled, state, input, option };

    Error(Kind kind, const std::string& what, std::string where = {}, std::string hint = {}, int error = 0)
        : std::runtime_error(what), kind(kind), where(std::move(where)), hint(std::move(hint)), error(error) {}

    Kind kind;
    std::string where, hint;
    int error;  // errno of a failed read, else 0
};

// The caller's arrays or numbers.
inline void require(bool fits, const char* what) {
    if (!fits) throw Error(Error::Kind::input, what);
}

inline void require_count(int64_t there, int64_t needed, const char* what) {
    if (there != needed)
        throw Error(Error::Kind::input,
                    std::string(what) + " has " + std::to_string(there) + " elements, needs " + std::to_string(needed));
}

// Sizes that a file or its config says.
inline void require_format(bool fits, const std::string& what, const std::string& where = {}) {
    if (!fits) throw Error(Error::Kind::format, what, where, "the file is damaged, or of a kind that is not supported");
}

}  // namespace moeflux
