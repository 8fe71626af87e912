// What is done with a row of numbers between products.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quartet {

struct RowKernels {
    // out: bf16 [count], x normed by its root mean square and weighed.
    void (*norm)(const float* x, const float* weight, int count, float eps, uint16_t* out);
    // One head, its halves rotated with each other; normed before where there is a weight. head_size: a multiple of 32.
    void (*rotate_head)(const float* x, const float* norm_weight, float eps, const float* cos, const float* sin,
                        int head_size, uint16_t* out);
    // To bf16; count: a multiple of 16.
    void (*round)(const float* x, int count, uint16_t* out);

    // Of a strip's product, values [num_rows][kStrip], to rows of out that are `stride` apart: its first `count`
    // columns with the bias, which has kStrip elements.
    void (*store)(const float* values, int num_rows, const float* bias, int count, float* out, size_t stride);
    // The same, added to what is there.
    void (*add)(const float* values, int num_rows, const float* bias, int count, float* out, size_t stride);
    // silu(gate) * up of a paired matrix, its first `count` columns of up to 16, to bf16 rows.
    void (*gate)(const float* values, int num_rows, const float* bias, int count, uint16_t* out, size_t stride);

    // bf16 [padded_inner] -> units, and per group of kRowGroup or kInt8Group the value of one; of kRowGroup also their sum.
    void (*quantize)(const uint16_t* row, int padded_inner, int group, int8_t* units, float* scales, int32_t* sums);
    // bf16 [padded_inner] -> float.
    void (*widen)(const uint16_t* row, int padded_inner, float* out);
};

namespace avx512 {
extern const RowKernels kRows;
}
namespace avx2 {
extern const RowKernels kRows;
}

}  // namespace quartet
