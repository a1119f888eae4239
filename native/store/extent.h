// Where bytes are: a file (by number), an offset, a length.
#pragma once

#include <cstdint>

namespace moeflux {

struct Extent {
    int file = 0;
    int64_t offset = 0, length = 0;
};

}  // namespace moeflux
