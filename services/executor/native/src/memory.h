#pragma once

#include <cstddef>
#include <cstdint>

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

}  // namespace quartet
