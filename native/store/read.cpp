#include "read.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "layout.h"

namespace moeflux {

namespace {
constexpr int64_t kBounceBytes = 1 << 20;
constexpr int kRetries = 2;
constexpr auto kPause = std::chrono::milliseconds(5);
}  // namespace

ExtentReader::ExtentReader(const std::atomic<bool>& stop) : stop_(stop), pages_(size_t(kBounceBytes)) {}

int64_t ExtentReader::some(int descriptor, uint8_t* to, int64_t n, int64_t offset, ReadResult& result) {
    for (int tries = 0;;) {
        const ssize_t got = ::pread(descriptor, to, size_t(n), offset);
        if (got >= 0) return got;
        const int error = errno;
        if (stop_.load(std::memory_order_relaxed)) return -error;
        if (error == EINTR) continue;
        if ((error != EIO && error != EAGAIN) || tries++ == kRetries) return -error;
        ++result.retries;
        std::this_thread::sleep_for(kPause * tries);
    }
}

ReadResult ExtentReader::read(File& file, const Extent& extent, uint8_t* to, bool in_place) {
    const int descriptor = file.direct_descriptor();
    if (descriptor < 0) return buffered(file, extent, to);
    ReadResult result = in_place ? direct(descriptor, file, extent, to) : bounced(descriptor, file, extent, to);
    if (result.error != EINVAL) return result;
    const bool first = file.refuse_direct();
    const int retries = result.retries;
    result = buffered(file, extent, to);
    result.retries += retries;
    result.fell_back = first;
    return result;
}

ReadResult ExtentReader::buffered(const File& file, const Extent& extent, uint8_t* to) {
    ReadResult result;
    while (result.done < extent.length) {
        const int64_t got =
            some(file.descriptor(), to + result.done, extent.length - result.done, extent.offset + result.done, result);
        if (got < 0) result.error = int(-got);
        if (got <= 0) return result;
        result.done += got;
    }
    return result;
}

ReadResult ExtentReader::direct(int descriptor, const File& file, const Extent& extent, uint8_t* to) {
    ReadResult result;
    const int64_t skip = extent.offset % kPage, begin = extent.offset - skip;
    const int64_t needed = skip + extent.length, all = round_up(needed, kPage);
    uint8_t* const pages = to - skip;
    int64_t done = 0;
    while (done < needed && done % kPage == 0) {
        const int64_t got = some(descriptor, pages + done, all - done, begin + done, result);
        if (got < 0) result.error = int(-got);
        if (got <= 0) break;
        done += got;
    }
    result.done = std::clamp<int64_t>(done - skip, 0, extent.length);
    if (done >= needed || result.error || done % kPage == 0) return result;
    // Cut within a page, as at the end of a file: the page cache can go on from there.
    const Extent rest = {extent.file, extent.offset + result.done, extent.length - result.done};
    const ReadResult tail = buffered(file, rest, to + result.done);
    result.done += tail.done;
    result.error = tail.error;
    result.retries += tail.retries;
    return result;
}

ReadResult ExtentReader::bounced(int descriptor, const File& file, const Extent& extent, uint8_t* to) {
    ReadResult result;
    while (result.done < extent.length) {
        const int64_t offset = extent.offset + result.done, skip = offset % kPage;
        const Extent piece = {extent.file, offset, std::min(extent.length - result.done, kBounceBytes - skip)};
        const ReadResult got = direct(descriptor, file, piece, pages_.data() + skip);
        std::memcpy(to + result.done, pages_.data() + skip, size_t(got.done));
        result.done += got.done;
        result.retries += got.retries;
        result.error = got.error;
        if (got.done < piece.length) return result;
    }
    return result;
}

}  // namespace moeflux
