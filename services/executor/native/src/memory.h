#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace quartet {

// Zeroed pages aligned to 64 bytes (large ones to huge pages), freed at the end; grows on demand, without its contents.
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(size_t num_bytes) { reserve(num_bytes); }
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    // False when there is not enough memory.
    bool reserve(size_t num_bytes);

    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }

  private:
    void* data_ = nullptr;
    size_t num_bytes_ = 0;
};

// Zeroed memory that stays until the end, one piece after another in huge pages: what every step reads front to back
// then costs few TLB misses, and the processor's prefetchers are not stopped at each 4 KiB.
class Arena {
  public:
    Arena() = default;
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Aligned to 64 bytes; null when there is not enough memory.
    void* allocate(size_t num_bytes);

    struct Region {
        void* data;
        size_t num_bytes;
        uint8_t* begin;
        size_t used;
    };
    const std::vector<Region>& regions() const { return regions_; }

  private:

    std::vector<Region> regions_;
    size_t left_ = 0;  // of the last region
};

}  // namespace quartet
