#include "file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "../error.h"

namespace moeflux {

namespace {

int open_patiently(const char* path, int flags) {
    int descriptor;
    do {
        descriptor = ::open(path, flags | O_RDONLY | O_CLOEXEC);
    } while (descriptor < 0 && errno == EINTR);
    return descriptor;
}

}  // namespace

File::File(const std::string& path, bool direct) : path_(path), buffered_(open_patiently(path.c_str(), 0)) {
    if (buffered_ < 0) {
        const int error = errno;
        throw Error(Error::Kind::read, std::strerror(error), path, "the model folder must stay where it is", error);
    }
    // Not every file system has direct reads; some say so here and some at the first read.
    if (direct) direct_ = open_patiently(path.c_str(), O_DIRECT);
}

File::~File() {
    if (direct_ >= 0) ::close(direct_);
    ::close(buffered_);
}

}  // namespace moeflux
