// A weight matrix in strips of 32 output columns, and its product with a batch of rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory.h"

namespace quartet {

constexpr int kStrip = 32;    // output columns of a strip: two vectors of 16
// Inner elements that share a scale: of 8 bits as many as a tile of AMX multiplies at once, of 4 bits GGML's.
constexpr int kInt8Group = 64;
constexpr int kInt4Group = 32;
constexpr int kRowGroup = 32;   // of a row of 8 bits, where vectors multiply it
constexpr int kInnerUnit = 64;  // of which rows and matrices have whole ones
constexpr int kRowBlock = 32;  // rows that a product takes at a time
// Of a product with one row: so many streams of reads keep the memory busier than one does.
constexpr int kStripsTogether = 3;

// Bytes of a group of a strip.
constexpr size_t kInt8GroupBytes = 2 * kStrip + kInt8Group * kStrip;
constexpr size_t kInt4GroupBytes = 2 * 2 * kStrip + kInt4Group * kStrip / 2;

enum class Format : int {
    kBf16 = 0,  // [K / 2][32][2] bf16: a line holds two k of 16 columns, as dpbf16ps and AMX want them
    kInt8 = 1,  // per group of 64 k: 32 bf16 scales, then [16][32 columns][4] int8
    kInt4 = 2,  // per group of 32 k: 32 fp16 scales, 32 fp16 minima, then [2 halves][4 lines][16 columns][4]: the low
                // nibbles are k = 4 * line + i, the high ones 16 more (GGML's Q4_1, columns side by side)
};

struct Matrix {
    Format format = Format::kBf16;
    int num_columns = 0;  // N, output features
    int num_inner = 0;    // K
    int padded_inner = 0;  // K rounded up to a whole unit; what is past K is 0
    int num_strips = 0;
    size_t strip_bytes = 0;
    uint8_t* weights = nullptr;
    float* bias = nullptr;  // [num_strips * 32], zeros without one

    const uint8_t* strip(int index) const { return weights + index * strip_bytes; }

    // Where column c of strip s is among the rows of the source; -1 past the end. With `paired` the source is two
    // matrices of N / 2 rows, and a strip holds 16 columns of the first, then the same 16 of the second.
    int source_row(int strip, int column, bool paired) const;

    // In the arena; false when memory is short. num_inner must be a multiple of kInt4Group for kInt4.
    bool allocate(Arena& arena, Format format, int num_columns, int num_inner, bool paired);

    // Row `row` of the source, K bf16 values.
    void pack_bf16_row(int strip, int column, const uint16_t* row);
    // Quantises to 8 bits, symmetric, a scale per group.
    void pack_int8_row(int strip, int column, const uint16_t* row);
    // K / 32 blocks as GGML stores them: fp16 scale, fp16 minimum, 16 bytes of nibbles.
    void pack_int4_row(int strip, int column, const uint8_t* blocks);

    // Column of the matrix as K floats (embedding lookup).
    void unpack_column(int column, float* out) const;
};

// What a product reads rows as.
enum class RowForm { kBf16, kFloat, kInt8By32, kInt8By64 };

// Rows that a product reads. `bf16` [M, stride] is always there, padded to a multiple of 32 rows and to
// padded_inner columns (these 0); the other forms where ProductKernels::row_form says so, padded alike.
struct Activations {
    const uint16_t* bf16 = nullptr;
    const float* floats = nullptr;   // the same in another form
    int stride = 0;
    const int8_t* int8 = nullptr;    // [M, int8_stride]
    int int8_stride = 0;
    const float* scales = nullptr;   // [M, group_stride] value of one unit
    const int32_t* sums = nullptr;   // [M, group_stride] sum of the group's units, for kInt8By32
    int group_stride = 0;
};

// Called with `num_rows` rows from `first_row` of a strip's product, [num_rows][32] float, bias not yet added.
struct Sink {
    virtual void take(int strip, int first_row, int num_rows, const float* values) const = 0;

  protected:
    ~Sink() = default;
};

struct ProductKernels {
    // Of a product of so many rows.
    RowForm (*row_form)(Format format, int num_rows, int isa);
    // Bytes of scratch memory that `multiply` needs per thread.
    size_t (*scratch_bytes)(const Matrix& matrix);
    // Strips [first, end) of x W^T for num_rows rows of x; `continues` where the thread reads strip `end` next.
    void (*multiply)(const Matrix& matrix, const Activations& x, int num_rows, int first, int end, bool continues,
                     int isa, uint8_t* scratch, const Sink& sink);
    // Reads num_bytes (a multiple of 256) and does no more: what a product with few rows takes at best.
    void (*read_bytes)(const uint8_t* data, size_t num_bytes);
    // AMX holds a configuration per thread: released so that the system need not save the tiles.
    void (*release_tiles)();
};

namespace avx512 {
extern const ProductKernels kProducts;
}
namespace avx2 {
extern const ProductKernels kProducts;
}

}  // namespace quartet
