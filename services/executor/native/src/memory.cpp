#include "memory.h"

#include <sys/mman.h>

namespace quartet {

Buffer::~Buffer() {
    if (data_) munmap(data_, num_bytes_);
}

bool Buffer::reserve(size_t num_bytes) {
    if (num_bytes <= num_bytes_) return true;
    if (data_) munmap(data_, num_bytes_);
    data_ = nullptr, num_bytes_ = 0;
    constexpr size_t kHuge = size_t{2} << 20;
    const size_t page = num_bytes >= kHuge ? kHuge : 4096;
    const size_t rounded = (num_bytes + page - 1) / page * page;
    void* data = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return false;
    // Weights are read front to back in every step: fewer TLB misses. It is only advice.
    if (page == kHuge) madvise(data, rounded, MADV_HUGEPAGE);
    data_ = data, num_bytes_ = rounded;
    return true;
}

}  // namespace quartet
