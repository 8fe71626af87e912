#include <type_traits>

#include "attention_products.h"

namespace quartet::QUARTET_ISA {
namespace {

// Sums that stay in registers: rows times pages, or times vectors.
constexpr int kMostRows = kRegisters >= 32 ? 6 : 4;
constexpr int kTogether = 4;

constexpr int most_together(int rows) { return kRegisters >= 32 || rows == 1 ? kTogether : rows == 2 ? 2 : 1; }

template <int Rows, int Pages>
void score_pages(const Chunk& chunk, int first_row, int page) {
    Floats sum[Rows][Pages];
    for (auto& row : sum)
        for (auto& part : row) part = zeros();
    const int head_size = chunk.head_size;
    const Operand* query = chunk.query + first_row * head_size;
    const uint16_t *keys[Pages], *next[Pages];
    for (int i = 0; i < Pages; ++i) keys[i] = chunk.keys[page + i], next[i] = chunk.values[page + i];
    for (int d = 0; d < head_size; d += 2) {
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
            Line line[Pages];
#pragma GCC unroll 4
            for (int i = 0; i < Pages; ++i) {
                line[i] = load_line(keys[i] + d * kPage, part);
                if (part == 0 && chunk.asks) ask(next[i] + d * kPage);
            }
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const Pair q = load_pair(query + r * head_size + d, part);
#pragma GCC unroll 4
                for (int i = 0; i < Pages; ++i) sum[r][i] = dot(sum[r][i], line[i], q);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < Pages; ++i)
            store(chunk.scores + (first_row + r) * kScoreStride + (page + i) * kPage, sum[r][i]);
}

template <int Rows>
void score_rows(const Chunk& chunk, int first_row) {
    constexpr int kPages = most_together(Rows);
    int page = 0;
    for (; page + kPages <= chunk.num_pages; page += kPages) score_pages<Rows, kPages>(chunk, first_row, page);
    if constexpr (kPages > 2)
        if (chunk.num_pages - page >= 2) score_pages<Rows, 2>(chunk, first_row, page), page += 2;
    if constexpr (kPages > 1)
        if (chunk.num_pages - page == 1) score_pages<Rows, 1>(chunk, first_row, page);
}

// Columns [d, d + 16 * Vectors) of `Rows` rows.
template <int Rows, int Vectors>
void mix_columns(const Chunk& chunk, int first_row, int d) {
    const int head_size = chunk.head_size;
    float* out = chunk.out + first_row * head_size + d;
    const Operand* weights = chunk.weights + first_row * kScoreStride;
    Floats sum[Rows][Vectors];
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) sum[r][v] = load(out + r * head_size + v * 16);
    for (int page = 0; page < chunk.num_pages; ++page) {
        const uint16_t *values = chunk.values[page] + 2 * d, *next = chunk.next_keys[page] + 2 * d;
#pragma GCC unroll 2
        for (int pair = 0; pair < kPage / 2; ++pair) {
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
                Line line[Vectors];
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; ++v) {
                    const size_t at = static_cast<size_t>(pair) * 2 * head_size + v * 32;
                    line[v] = load_line(values + at, part);
                    if (part == 0 && chunk.asks) ask(next + at);
                }
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r) {
                    const Pair p = load_pair(weights + r * kScoreStride + page * kPage + 2 * pair, part);
#pragma GCC unroll 4
                    for (int v = 0; v < Vectors; ++v) sum[r][v] = dot(sum[r][v], line[v], p);
                }
            }
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) store(out + r * head_size + v * 16, sum[r][v]);
}

template <int Rows>
void mix_rows(const Chunk& chunk, int first_row) {
    constexpr int kVectors = most_together(Rows);
    int d = 0;
    for (; d + 16 * kVectors <= chunk.head_size; d += 16 * kVectors) mix_columns<Rows, kVectors>(chunk, first_row, d);
    if constexpr (kVectors > 2)
        if (d < chunk.head_size) mix_columns<Rows, 2>(chunk, first_row, d);
}

// body with `rows` as a constant, where it is one of 1 to Most.
template <int Most, class Body>
void with_rows(int rows, const Body& body) {
    if constexpr (Most > 0) {
        if (rows == Most) return body(std::integral_constant<int, Most>());
        with_rows<Most - 1>(rows, body);
    }
}

}  // namespace

void score_vectors(const Chunk& chunk) {
    int row = 0;
    for (; row + kMostRows <= chunk.num_rows; row += kMostRows) score_rows<kMostRows>(chunk, row);
    with_rows<kMostRows - 1>(chunk.num_rows - row, [&](auto rows) { score_rows<rows()>(chunk, row); });
}

void mix_vectors(const Chunk& chunk) {
    int row = 0;
    for (; row + kMostRows <= chunk.num_rows; row += kMostRows) mix_rows<kMostRows>(chunk, row);
    with_rows<kMostRows - 1>(chunk.num_rows - row, [&](auto rows) { mix_rows<rows()>(chunk, row); });
}

}  // namespace quartet::QUARTET_ISA
