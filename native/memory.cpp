#include "memory.h"

#include <sys/mman.h>

#include <new>

namespace moeflux {

namespace {
constexpr size_t kHuge = size_t(2) << 20;
constexpr size_t kSlack = 4096;  // kernels may prefetch and, in whole vectors, read a little past the end
}  // namespace

Block::Block(size_t bytes) : size_(bytes) {
    mapped_ = bytes >= kHuge ? (bytes + kSlack + kHuge - 1) / kHuge * kHuge + kHuge : bytes + kSlack;
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    const uintptr_t start = reinterpret_cast<uintptr_t>(base_);
    data_ = reinterpret_cast<uint8_t*>(bytes >= kHuge ? (start + kHuge - 1) / kHuge * kHuge : start);
    if (bytes >= kHuge) madvise(data_, (bytes + kSlack + kHuge - 1) / kHuge * kHuge, MADV_HUGEPAGE);
}

Block::~Block() { munmap(base_, mapped_); }

}  // namespace moeflux
