// AMX tile configurations, one at a time per thread. Included by AVX-512 files only.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace quartet::avx512 {

struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int num_bytes) {
        rows[tile] = static_cast<uint8_t>(num_rows);
        row_bytes[tile] = static_cast<uint16_t>(num_bytes);
    }
};

// The configuration this thread has: 0 none, -1 products', n > 0 attention's for n query rows.
extern thread_local int current_tiles;

}  // namespace quartet::avx512
