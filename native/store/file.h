// The files of a checkpoint, opened for reading by the store itself: through the page cache, and past it where that works.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace moeflux {

class File {
public:
    // Throws Error where it cannot be opened. Where direct reads cannot be had it does without them.
    File(const std::string& path, bool direct);
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    const std::string& path() const { return path_; }
    int descriptor() const { return buffered_; }
    int direct_descriptor() const { return refused_.load(std::memory_order_relaxed) ? -1 : direct_; }
    // No direct reads from now on. True for the first to say so.
    bool refuse_direct() { return !refused_.exchange(true); }

private:
    std::string path_;
    int buffered_ = -1, direct_ = -1;
    std::atomic<bool> refused_{false};
};

using Files = std::vector<std::unique_ptr<File>>;

}  // namespace moeflux
