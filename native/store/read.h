// Bytes of an extent into memory, whatever the drive does: short reads are continued, interruptions repeated, errors of the
// drive tried again twice, direct reads that the file system refuses replaced by buffered ones. Knows nothing of slots.
#pragma once

#include <atomic>
#include <cstdint>

#include "../memory.h"
#include "extent.h"
#include "file.h"

namespace moeflux {

struct ReadResult {
    int64_t done = 0;        // bytes of the extent that arrived, from its beginning
    int error = 0;           // errno; 0 with fewer bytes than asked for: the file ends there
    int retries = 0;         // of reads that the drive had failed
    bool fell_back = false;  // this read found out that the file cannot be read directly
};

// What one reader needs: pages of its own for direct reads that are not in place. `stop` cuts a read short.
class ExtentReader {
public:
    explicit ExtentReader(const std::atomic<bool>& stop);

    // `to`: where the first byte of the extent goes. `in_place`: the memory around it has room for whole pages, and `to` lies
    // as far into its page as the extent's offset does into its own.
    ReadResult read(File& file, const Extent& extent, uint8_t* to, bool in_place);

private:
    ReadResult buffered(const File& file, const Extent& extent, uint8_t* to);
    ReadResult direct(int descriptor, const File& file, const Extent& extent, uint8_t* to);
    ReadResult bounced(int descriptor, const File& file, const Extent& extent, uint8_t* to);
    // One pread of at least one byte. Returns its bytes, 0 at the end of the file, or -errno.
    int64_t some(int descriptor, uint8_t* to, int64_t n, int64_t offset, ReadResult& result);

    const std::atomic<bool>& stop_;
    Block pages_;
};

}  // namespace moeflux
