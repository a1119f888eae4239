// Memory for weights: huge pages where the kernel gives them, because 4 KiB pages cost about 15 % of the bandwidth.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeflux {

class Block {
public:
    explicit Block(size_t bytes);  // zeroed; throws std::bad_alloc
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0, mapped_ = 0;
    void* base_ = nullptr;
};

}  // namespace moeflux
