// What can go wrong in the store, as one exception that carries what a person needs to know.
#pragma once

#include <stdexcept>
#include <string>

namespace moeflux {

class StoreError : public std::runtime_error {
public:
    enum class Kind : int { read, format, closed, full };

    StoreError(Kind kind, const std::string& what, std::string where = {}, std::string hint = {}, int error = 0)
        : std::runtime_error(what), kind(kind), where(std::move(where)), hint(std::move(hint)), error(error) {}

    Kind kind;
    std::string where, hint;
    int error;  // errno of a failed read, else 0
};

}  // namespace moeflux
