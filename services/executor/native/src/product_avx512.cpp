#include "cpu.h"
#include "matrix.h"
#include "product_tiles.h"
#include "simd.h"

namespace quartet::avx512 {
namespace {

// Up to so many rows a vector product is the faster one: it reads the weights as fast as memory gives them, and those
// of 4 bits need not be unpacked for the tiles first. Measured.
constexpr int kVectorRowsBf16 = 4;
constexpr int kVectorRowsInt8 = 6;
constexpr int kVectorRowsInt4 = 11;
// How far ahead lines are asked for where nothing but reading is done.
constexpr int kReadAhead = 1024;

bool uses_tiles(Format format, int num_rows, int isa) {
    const int vector_rows = format == Format::kBf16   ? kVectorRowsBf16
                            : format == Format::kInt8 ? kVectorRowsInt8
                                                      : kVectorRowsInt4;
    return (isa & kAmx) && num_rows > vector_rows;
}

// --- bf16, vectors --------------------------------------------------------------------------------

// `Strips` strips side by side: one stream of reads does not fill the memory's queue. Past a strip's end `ahead` bytes
// further are asked for.
template <int Rows, int Unroll, int Strips = 1>
void bf16_rows(const uint8_t* strip, const uint16_t* x, int stride, int num_pairs, float* out, ptrdiff_t ahead = 0) {
    __m512 sum[Unroll][Strips][Rows][2];
    for (auto& part : sum)
        for (auto& one : part)
            for (auto& row : one) row[0] = row[1] = _mm512_setzero_ps();
    const size_t strip_bytes = (size_t)num_pairs * 128;
    // padded_inner is a multiple of 32, so there are whole rounds.
    ptrdiff_t asked = kPrefetchBytes;
    for (int pair = 0; pair < num_pairs; pair += Unroll) {
        if (pair == num_pairs - kPrefetchBytes / 128) asked += ahead;
#pragma GCC unroll 4
        for (int u = 0; u < Unroll; ++u) {
#pragma GCC unroll 4
            for (int s = 0; s < Strips; ++s) {
                const uint8_t* line = strip + s * strip_bytes + (size_t)(pair + u) * 128;
                _mm_prefetch((const char*)line + asked, _MM_HINT_T0);
                _mm_prefetch((const char*)line + asked + 64, _MM_HINT_T0);
                const __m512i w0 = _mm512_load_si512(line), w1 = _mm512_load_si512(line + 64);
#pragma GCC unroll 12
                for (int r = 0; r < Rows; ++r) {
                    const __m512i a = broadcast4(x + (size_t)r * stride + 2 * (pair + u));
                    sum[u][s][r][0] = dot_bf16(sum[u][s][r][0], w0, a);
                    sum[u][s][r][1] = dot_bf16(sum[u][s][r][1], w1, a);
                }
            }
        }
    }
    for (int s = 0; s < Strips; ++s)
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r)
            for (int h = 0; h < 2; ++h) {
                __m512 total = sum[0][s][r][h];
                for (int u = 1; u < Unroll; ++u) total = _mm512_add_ps(total, sum[u][s][r][h]);
                _mm512_storeu_ps(out + (s * Rows + r) * kStrip + h * 16, total);
            }
}

void bf16_block(const uint8_t* strip, const uint16_t* x, int stride, int num_pairs, int rows, float* out) {
    for (; rows >= 12; rows -= 12, x += 12 * (size_t)stride, out += 12 * kStrip)
        bf16_rows<12, 1>(strip, x, stride, num_pairs, out);
    switch (rows) {
        case 1: return bf16_rows<1, 4>(strip, x, stride, num_pairs, out);
        case 2: return bf16_rows<2, 4>(strip, x, stride, num_pairs, out);
        case 3: return bf16_rows<3, 2>(strip, x, stride, num_pairs, out);
        case 4: return bf16_rows<4, 2>(strip, x, stride, num_pairs, out);
        case 5: return bf16_rows<5, 2>(strip, x, stride, num_pairs, out);
        case 6: return bf16_rows<6, 1>(strip, x, stride, num_pairs, out);
        case 7: return bf16_rows<7, 1>(strip, x, stride, num_pairs, out);
        case 8: return bf16_rows<8, 1>(strip, x, stride, num_pairs, out);
        case 9: return bf16_rows<9, 1>(strip, x, stride, num_pairs, out);
        case 10: return bf16_rows<10, 1>(strip, x, stride, num_pairs, out);
        case 11: return bf16_rows<11, 1>(strip, x, stride, num_pairs, out);
    }
}

// --- quantised weights and rows, vectors ----------------------------------------------------------

// GCC 12 wraps the intrinsic in register moves.
inline void dot_int8(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

template <int Rows, int Strips = 1>
void int8_rows(const Matrix& matrix, int strip, const Activations& x, int first_row, float* out, ptrdiff_t ahead = 0) {
    const uint8_t* first = matrix.strip(strip);
    const size_t strip_bytes = matrix.strip_bytes;
    const int num_groups = matrix.padded_inner / kInt8Group;
    constexpr int kParts = kInt8Group / kRowGroup;
    const __m512i signs = _mm512_set1_epi8(-128);
    __m512 total[Strips][Rows][2];
    for (auto& part : total)
        for (auto& row : part) row[0] = row[1] = _mm512_setzero_ps();
    ptrdiff_t asked = kPrefetchBytes;
    for (int g = 0; g < num_groups; ++g, first += kInt8GroupBytes) {
        if (g == num_groups - (int)((kPrefetchBytes + kInt8GroupBytes - 1) / kInt8GroupBytes)) asked += ahead;
        // Rows have scales of their own for each half.
        for (int part = g * kParts; part < (g + 1) * kParts; ++part) {
            __m512i sum[Strips][Rows][2];
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
                for (int s = 0; s < Strips; ++s)
                    // Weights are multiplied as if they were 128 larger.
                    sum[s][r][0] = sum[s][r][1] =
                        _mm512_set1_epi32(-128 * x.sums[(size_t)(first_row + r) * x.group_stride + part]);
#pragma GCC unroll 8
            for (int quad = 0; quad < kRowGroup / 4; ++quad)
#pragma GCC unroll 4
                for (int s = 0; s < Strips; ++s) {
                    const uint8_t* line =
                        first + s * strip_bytes + 2 * kStrip + ((part - g * kParts) * (kRowGroup / 4) + quad) * 128;
                    _mm_prefetch((const char*)line + asked, _MM_HINT_T0);
                    _mm_prefetch((const char*)line + asked + 64, _MM_HINT_T0);
                    const __m512i w0 = _mm512_xor_si512(_mm512_load_si512(line), signs);
                    const __m512i w1 = _mm512_xor_si512(_mm512_load_si512(line + 64), signs);
#pragma GCC unroll 8
                    for (int r = 0; r < Rows; ++r) {
                        const __m512i a =
                            broadcast4(x.int8 + (size_t)(first_row + r) * x.int8_stride + part * kRowGroup + quad * 4);
                        dot_int8(sum[s][r][0], w0, a);
                        dot_int8(sum[s][r][1], w1, a);
                    }
                }
#pragma GCC unroll 4
            for (int s = 0; s < Strips; ++s) {
                const uint16_t* header = reinterpret_cast<const uint16_t*>(first + s * strip_bytes);
                const __m512 s0 = load_bf16(header), s1 = load_bf16(header + 16);
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r) {
                    const __m512 scale = _mm512_set1_ps(x.scales[(size_t)(first_row + r) * x.group_stride + part]);
                    __m512* row = total[s][r];
                    row[0] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum[s][r][0]), s0), scale, row[0]);
                    row[1] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum[s][r][1]), s1), scale, row[1]);
                }
            }
        }
    }
    for (int s = 0; s < Strips; ++s)
        for (int r = 0; r < Rows; ++r)
            for (int h = 0; h < 2; ++h) _mm512_storeu_ps(out + (s * Rows + r) * kStrip + h * 16, total[s][r][h]);
}

template <int Rows, int Strips = 1>
void int4_rows(const Matrix& matrix, int strip, const Activations& x, int first_row, float* out, ptrdiff_t ahead = 0) {
    const uint8_t* first = matrix.strip(strip);
    const size_t strip_bytes = matrix.strip_bytes;
    const int num_groups = matrix.padded_inner / kInt4Group;
    const __m512i low = _mm512_set1_epi8(15);
    __m512 total[Strips][Rows][2];
    for (auto& part : total)
        for (auto& row : part) row[0] = row[1] = _mm512_setzero_ps();
    ptrdiff_t asked = kPrefetchBytes;
    for (int g = 0; g < num_groups; ++g, first += kInt4GroupBytes) {
        if (g == num_groups - (int)(kPrefetchBytes / kInt4GroupBytes)) asked += ahead;
#pragma GCC unroll 4
        for (int s = 0; s < Strips; ++s) {
            const uint8_t* group = first + s * strip_bytes;
            for (size_t line = 0; line < kInt4GroupBytes; line += 64)
                _mm_prefetch((const char*)group + asked + line, _MM_HINT_T0);
            const uint16_t* header = reinterpret_cast<const uint16_t*>(group);
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h) {
                const uint8_t* lines = group + 128 + h * 256;
                __m512i sum[Rows];
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r) sum[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
                for (int line = 0; line < 4; ++line) {
                    const __m512i packed = _mm512_load_si512(lines + line * 64);
                    const __m512i w0 = _mm512_and_si512(packed, low);
                    const __m512i w1 = _mm512_and_si512(_mm512_srli_epi16(packed, 4), low);
#pragma GCC unroll 8
                    for (int r = 0; r < Rows; ++r) {
                        const int8_t* units = x.int8 + (size_t)(first_row + r) * x.int8_stride + g * kInt4Group + line * 4;
                        dot_int8(sum[r], w0, broadcast4(units));
                        dot_int8(sum[r], w1, broadcast4(units + 16));
                    }
                }
                const __m512 scale = load_fp16(header + h * 16), minimum = load_fp16(header + kStrip + h * 16);
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r) {
                    const size_t at = (size_t)(first_row + r) * x.group_stride + g;
                    const __m512 units = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), scale,
                                                         _mm512_mul_ps(minimum, _mm512_set1_ps((float)x.sums[at])));
                    total[s][r][h] = _mm512_fmadd_ps(units, _mm512_set1_ps(x.scales[at]), total[s][r][h]);
                }
            }
        }
    }
    for (int s = 0; s < Strips; ++s)
        for (int r = 0; r < Rows; ++r)
            for (int h = 0; h < 2; ++h) _mm512_storeu_ps(out + (s * Rows + r) * kStrip + h * 16, total[s][r][h]);
}

template <int Rows>
void quantized_rows(const Matrix& matrix, int strip, const Activations& x, int first_row, float* out) {
    matrix.format == Format::kInt8 ? int8_rows<Rows>(matrix, strip, x, first_row, out)
                                   : int4_rows<Rows>(matrix, strip, x, first_row, out);
}

void quantized_block(const Matrix& matrix, int strip, const Activations& x, int first_row, int rows, float* out) {
    for (; rows >= 6; rows -= 6, first_row += 6, out += 6 * kStrip)
        quantized_rows<6>(matrix, strip, x, first_row, out);
    switch (rows) {
        case 1: return quantized_rows<1>(matrix, strip, x, first_row, out);
        case 2: return quantized_rows<2>(matrix, strip, x, first_row, out);
        case 3: return quantized_rows<3>(matrix, strip, x, first_row, out);
        case 4: return quantized_rows<4>(matrix, strip, x, first_row, out);
        case 5: return quantized_rows<5>(matrix, strip, x, first_row, out);
    }
}

void multiply_strip(const Matrix& matrix, const Activations& x, int num_rows, int strip, bool continues, int isa,
                    uint8_t* scratch, const Sink& sink) {
    if (uses_tiles(matrix.format, num_rows, isa))
        return multiply_strip_by_tiles(matrix, x, num_rows, strip, continues, scratch, sink);
    alignas(64) float values[kRowBlock * kStrip];
    for (int first = 0; first < num_rows; first += kRowBlock) {
        const int rows = num_rows - first < kRowBlock ? num_rows - first : kRowBlock;
        if (matrix.format == Format::kBf16)
            bf16_block(matrix.strip(strip), x.bf16 + (size_t)first * x.stride, x.stride, matrix.padded_inner / 2, rows,
                       values);
        else
            quantized_block(matrix, strip, x, first, rows, values);
        sink.take(strip, first, rows, values);
    }
}

RowForm row_form(Format format, int num_rows, int isa) {
    if (uses_tiles(format, num_rows, isa)) return tile_row_form(format, num_rows);
    return format == Format::kBf16 ? RowForm::kBf16 : RowForm::kInt8By32;
}

void multiply(const Matrix& matrix, const Activations& x, int num_rows, int strip, int end, bool continues, int isa,
              uint8_t* scratch, const Sink& sink) {
    if (num_rows == 1) {
        alignas(64) float values[kStripsTogether * kStrip];
        for (; strip + kStripsTogether <= end; strip += kStripsTogether) {
            const bool goes_on = continues || strip + kStripsTogether < end;
            const ptrdiff_t ahead = goes_on ? (kStripsTogether - 1) * (ptrdiff_t)matrix.strip_bytes : 0;
            if (matrix.format == Format::kBf16)
                bf16_rows<1, 1, kStripsTogether>(matrix.strip(strip), x.bf16, x.stride, matrix.padded_inner / 2, values,
                                                 ahead);
            else if (matrix.format == Format::kInt8)
                int8_rows<1, kStripsTogether>(matrix, strip, x, 0, values, ahead);
            else
                int4_rows<1, kStripsTogether>(matrix, strip, x, 0, values, ahead);
            for (int s = 0; s < kStripsTogether; ++s) sink.take(strip + s, 0, 1, values + s * kStrip);
        }
    }
    for (; strip < end; ++strip)
        multiply_strip(matrix, x, num_rows, strip, continues || strip + 1 < end, isa, scratch, sink);
}

void read_bytes(const uint8_t* data, size_t num_bytes) {
    __m512i sum[4] = {};
    const size_t part = num_bytes / 4;
    for (size_t at = 0; at < part; at += 64)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const uint8_t* line = data + i * part + at;
            _mm_prefetch((const char*)line + kReadAhead, _MM_HINT_T0);
            sum[i] = _mm512_xor_si512(sum[i], _mm512_load_si512(line));
        }
    for (auto& one : sum) __asm__ volatile("" : : "v"(one));
}

}  // namespace

const ProductKernels kProducts = {row_form, tile_scratch_bytes, multiply, read_bytes, release_tiles};

}  // namespace quartet::avx512
