#include "attention_products.h"
#include "tiles.h"

namespace quartet::avx512 {
namespace {

// 0-3 sums [16, 16], 4 query [16, 32] or weights' operand of keys 5 [16 pairs, 16], 6 weights [16, 16], 7 values
// [8 pairs, 16].
void configure_attention_tiles(int num_rows) {
    // A product takes a cycle for each row. Blocks of many rows have one configuration: to change it costs more.
    if (num_rows > kFewTileRows) num_rows = kBlockRows;
    if (current_tiles == num_rows) return;
    TileConfig config;
    for (int tile = 0; tile < 5; ++tile) config.set(tile, num_rows, 64);
    config.set(5, kBlockRows, 64);
    config.set(6, num_rows, 32);
    config.set(7, 8, 64);
    _tile_loadconfig(&config);
    current_tiles = num_rows;
}

// 1 KiB, as much as a tile.
inline void ask_tile(const uint16_t* lines) {
    for (int line = 0; line < 16; ++line) ask(lines + line * 32);
}

}  // namespace

void score_tiles(const Chunk& chunk) {
    configure_attention_tiles(chunk.num_rows);
    const int head_size = chunk.head_size;
    for (int page = 0; page < chunk.num_pages; page += 4) {
        const uint16_t *const *keys = chunk.keys + page, *const *values = chunk.values + page;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int d = 0; d < head_size; d += 32) {
            _tile_loadd(4, chunk.query + d, 2 * head_size);
            _tile_loadd(5, keys[0] + d * kPage, 64);
            if (chunk.asks) ask_tile(values[0] + d * kPage);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(5, keys[1] + d * kPage, 64);
            if (chunk.asks) ask_tile(values[1] + d * kPage);
            _tile_dpbf16ps(1, 4, 5);
            _tile_loadd(5, keys[2] + d * kPage, 64);
            if (chunk.asks) ask_tile(values[2] + d * kPage);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(5, keys[3] + d * kPage, 64);
            if (chunk.asks) ask_tile(values[3] + d * kPage);
            _tile_dpbf16ps(3, 4, 5);
        }
        float* out = chunk.scores + page * kPage;
        _tile_stored(0, out, 4 * kScoreStride);
        _tile_stored(1, out + 16, 4 * kScoreStride);
        _tile_stored(2, out + 32, 4 * kScoreStride);
        _tile_stored(3, out + 48, 4 * kScoreStride);
    }
}

void mix_tiles(const Chunk& chunk) {
    configure_attention_tiles(chunk.num_rows);
    const long stride = 4L * chunk.head_size;
    int d = 0;
    for (; d + 64 <= chunk.head_size; d += 64) {
        float* out = chunk.out + d;
        _tile_loadd(0, out, stride);
        _tile_loadd(1, out + 16, stride);
        _tile_loadd(2, out + 32, stride);
        _tile_loadd(3, out + 48, stride);
        for (int page = 0; page < chunk.num_pages; ++page) {
            const uint16_t* values = chunk.values[page] + d * 2;
            const uint16_t* next = chunk.next_keys[page] + d * kPage;
            if (chunk.asks)
                for (int tile = 0; tile < 2; ++tile) ask_tile(next + tile * 512);
            _tile_loadd(6, chunk.weights + page * kPage, 2 * kScoreStride);
            _tile_loadd(7, values, stride);
            _tile_dpbf16ps(0, 6, 7);
            _tile_loadd(7, values + 32, stride);
            _tile_dpbf16ps(1, 6, 7);
            _tile_loadd(7, values + 64, stride);
            _tile_dpbf16ps(2, 6, 7);
            _tile_loadd(7, values + 96, stride);
            _tile_dpbf16ps(3, 6, 7);
        }
        _tile_stored(0, out, stride);
        _tile_stored(1, out + 16, stride);
        _tile_stored(2, out + 32, stride);
        _tile_stored(3, out + 48, stride);
    }
    if (d < chunk.head_size) {
        float* out = chunk.out + d;
        _tile_loadd(0, out, stride);
        _tile_loadd(1, out + 16, stride);
        for (int page = 0; page < chunk.num_pages; ++page) {
            const uint16_t* values = chunk.values[page] + d * 2;
            const uint16_t* next = chunk.next_keys[page] + d * kPage;
            if (chunk.asks)
                for (int tile = 0; tile < 1; ++tile) ask_tile(next + tile * 512);
            _tile_loadd(6, chunk.weights + page * kPage, 2 * kScoreStride);
            _tile_loadd(7, values, stride);
            _tile_dpbf16ps(0, 6, 7);
            _tile_loadd(7, values + 32, stride);
            _tile_dpbf16ps(1, 6, 7);
        }
        _tile_stored(0, out, stride);
        _tile_stored(1, out + 16, stride);
    }
}

}  // namespace quartet::avx512
