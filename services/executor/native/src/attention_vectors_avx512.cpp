#include "attention_products.h"
#include "simd.h"

namespace quartet {
namespace {

constexpr int kMostRows = 6;

template <int Rows, int Pages>
void score_pages(const Chunk& chunk, int first_row, int page) {
    __m512 sum[Rows][Pages];
    for (auto& row : sum)
        for (auto& part : row) part = _mm512_setzero_ps();
    const int head_size = chunk.head_size;
    const uint16_t* query = chunk.query + first_row * head_size;
    const uint16_t *keys[Pages], *next[Pages];
    for (int i = 0; i < Pages; ++i) keys[i] = chunk.keys[page + i], next[i] = chunk.values[page + i];
    for (int d = 0; d < head_size; d += 2) {
        __m512i line[Pages];
#pragma GCC unroll 4
        for (int i = 0; i < Pages; ++i) {
            line[i] = _mm512_loadu_si512(keys[i] + d * kPage);
            if (chunk.asks) ask(next[i] + d * kPage);
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const __m512i q = broadcast4(query + r * head_size + d);
#pragma GCC unroll 4
            for (int i = 0; i < Pages; ++i) sum[r][i] = dot_bf16(sum[r][i], line[i], q);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < Pages; ++i)
            _mm512_store_ps(chunk.scores + (first_row + r) * kScoreStride + (page + i) * kPage, sum[r][i]);
}

template <int Rows>
void score_rows(const Chunk& chunk, int first_row) {
    int page = 0;
    for (; page + 4 <= chunk.num_pages; page += 4) score_pages<Rows, 4>(chunk, first_row, page);
    if (chunk.num_pages - page >= 2) score_pages<Rows, 2>(chunk, first_row, page), page += 2;
    if (chunk.num_pages - page == 1) score_pages<Rows, 1>(chunk, first_row, page);
}

// Columns [d, d + 16 * Vectors) of `Rows` rows.
template <int Rows, int Vectors>
void mix_columns(const Chunk& chunk, int first_row, int d) {
    const int head_size = chunk.head_size;
    float* out = chunk.out + first_row * head_size + d;
    const uint16_t* weights = chunk.weights + first_row * kScoreStride;
    __m512 sum[Rows][Vectors];
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) sum[r][v] = _mm512_loadu_ps(out + r * head_size + v * 16);
    for (int page = 0; page < chunk.num_pages; ++page) {
        const uint16_t *values = chunk.values[page] + 2 * d, *next = chunk.next_keys[page] + 2 * d;
#pragma GCC unroll 2
        for (int pair = 0; pair < kPage / 2; ++pair) {
            __m512i line[Vectors];
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) {
                const size_t at = static_cast<size_t>(pair) * 2 * head_size + v * 32;
                line[v] = _mm512_loadu_si512(values + at);
                if (chunk.asks) ask(next + at);
            }
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const __m512i p = broadcast4(weights + r * kScoreStride + page * kPage + 2 * pair);
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; ++v) sum[r][v] = dot_bf16(sum[r][v], line[v], p);
            }
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) _mm512_storeu_ps(out + r * head_size + v * 16, sum[r][v]);
}

template <int Rows>
void mix_rows(const Chunk& chunk, int first_row) {
    int d = 0;
    for (; d + 64 <= chunk.head_size; d += 64) mix_columns<Rows, 4>(chunk, first_row, d);
    if (d < chunk.head_size) mix_columns<Rows, 2>(chunk, first_row, d);
}

}  // namespace

void score_vectors(const Chunk& chunk) {
    int row = 0;
    for (; row + kMostRows <= chunk.num_rows; row += kMostRows) score_rows<kMostRows>(chunk, row);
    switch (chunk.num_rows - row) {
        case 1: return score_rows<1>(chunk, row);
        case 2: return score_rows<2>(chunk, row);
        case 3: return score_rows<3>(chunk, row);
        case 4: return score_rows<4>(chunk, row);
        case 5: return score_rows<5>(chunk, row);
    }
}

void mix_vectors(const Chunk& chunk) {
    int row = 0;
    for (; row + kMostRows <= chunk.num_rows; row += kMostRows) mix_rows<kMostRows>(chunk, row);
    switch (chunk.num_rows - row) {
        case 1: return mix_rows<1>(chunk, row);
        case 2: return mix_rows<2>(chunk, row);
        case 3: return mix_rows<3>(chunk, row);
        case 4: return mix_rows<4>(chunk, row);
        case 5: return mix_rows<5>(chunk, row);
    }
}

}  // namespace quartet
