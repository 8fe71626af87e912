#include "memory.h"

#include <sys/mman.h>

#include <algorithm>

namespace quartet {
namespace {

constexpr size_t kHuge = size_t{2} << 20;
// Of an arena; what is not used yet takes address space only.
constexpr size_t kRegion = size_t{64} << 20;

size_t rounded(size_t num_bytes, size_t unit) { return (num_bytes + unit - 1) / unit * unit; }

void* map(size_t num_bytes) {
    void* data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return data == MAP_FAILED ? nullptr : data;
}

}  // namespace

Buffer::~Buffer() {
    if (data_) munmap(data_, num_bytes_);
}

bool Buffer::reserve(size_t num_bytes) {
    if (num_bytes <= num_bytes_) return true;
    if (data_) munmap(data_, num_bytes_);
    data_ = nullptr, num_bytes_ = 0;
    const size_t size = rounded(num_bytes, 4096);
    data_ = map(size);
    if (data_) num_bytes_ = size;
    return data_ != nullptr;
}

Arena::~Arena() {
    for (const Region& region : regions_) munmap(region.data, region.num_bytes);
}

void* Arena::allocate(size_t num_bytes) {
    const size_t size = rounded(num_bytes, 64);
    if (size > left_) {
        const size_t usable = rounded(std::max(size, kRegion), kHuge), mapped = usable + kHuge;
        void* data = map(mapped);
        if (!data) return nullptr;
        auto* begin = reinterpret_cast<uint8_t*>(rounded(reinterpret_cast<uintptr_t>(data), kHuge));
        madvise(begin, usable, MADV_HUGEPAGE);  // only advice
        regions_.push_back({data, mapped, begin, 0});
        left_ = usable;
    }
    Region& region = regions_.back();
    void* piece = region.begin + region.used;
    region.used += size, left_ -= size;
    return piece;
}

}  // namespace quartet
