// Products by AMX: what product_avx512.cpp leaves to tiles.
#pragma once

#include "matrix.h"

namespace quartet::avx512 {

// How far ahead of its use a strip is asked for.
constexpr int kPrefetchBytes = 4096;

// What the tiles read so many rows as.
RowForm tile_row_form(Format format, int num_rows);
// Bytes that multiply_strip_by_tiles unpacks a strip to.
size_t tile_scratch_bytes(const Matrix& matrix);
// See ProductKernels::multiply.
void multiply_strip_by_tiles(const Matrix& matrix, const Activations& x, int num_rows, int strip, bool continues,
                             uint8_t* scratch, const Sink& sink);
void release_tiles();

}  // namespace quartet::avx512
