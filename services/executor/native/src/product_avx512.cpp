#include "matrix.h"
#include "cpu.h"
#include "simd.h"
#include "tiles.h"

namespace quartet::avx512 {

thread_local int current_tiles = 0;

namespace {

void release_tiles() {
    if (current_tiles != 0) {
        _tile_release();
        current_tiles = 0;
    }
}

// Up to so many rows a vector product is the faster one: it reads the weights as fast as memory gives them, and
// quantised ones need not be unpacked for the tiles first. Measured.
constexpr int kVectorRowsBf16 = 4;
constexpr int kVectorRowsInt8 = 20;
constexpr int kVectorRowsInt4 = 12;
// How far ahead of its use a strip is asked for.
constexpr int kPrefetchBytes = 4096;
// The same where nothing but reading is done.
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
    const int num_groups = matrix.padded_inner / kGroup;
    __m512 total[Strips][Rows][2];
    for (auto& part : total)
        for (auto& row : part) row[0] = row[1] = _mm512_setzero_ps();
    ptrdiff_t asked = kPrefetchBytes;
    for (int g = 0; g < num_groups; ++g, first += kInt8GroupBytes) {
        if (g == num_groups - (int)(kPrefetchBytes / kInt8GroupBytes)) asked += ahead;
        __m512i sum[Strips][Rows][2];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int s = 0; s < Strips; ++s)
                // Stored weights are 128 too large.
                sum[s][r][0] = sum[s][r][1] =
                    _mm512_set1_epi32(-128 * x.sums[(size_t)(first_row + r) * x.group_stride + g]);
#pragma GCC unroll 8
        for (int quad = 0; quad < kGroup / 4; ++quad)
#pragma GCC unroll 4
            for (int s = 0; s < Strips; ++s) {
                const uint8_t* line = first + s * strip_bytes + 2 * kStrip + quad * 128;
                _mm_prefetch((const char*)line + asked, _MM_HINT_T0);
                _mm_prefetch((const char*)line + asked + 64, _MM_HINT_T0);
                const __m512i w0 = _mm512_load_si512(line), w1 = _mm512_load_si512(line + 64);
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r) {
                    const __m512i a =
                        broadcast4(x.int8 + (size_t)(first_row + r) * x.int8_stride + g * kGroup + quad * 4);
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
                const __m512 scale = _mm512_set1_ps(x.scales[(size_t)(first_row + r) * x.group_stride + g]);
                __m512* row = total[s][r];
                row[0] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum[s][r][0]), s0), scale, row[0]);
                row[1] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum[s][r][1]), s1), scale, row[1]);
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
    const int num_groups = matrix.padded_inner / kGroup;
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
                        const int8_t* units = x.int8 + (size_t)(first_row + r) * x.int8_stride + g * kGroup + line * 4;
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

// --- quantised weights as bf16 lines --------------------------------------------------------------

// Even and odd k as two bf16 in each 32-bit lane.
inline __m512i rounded_pairs(__m512 even, __m512 odd) {
    // Half a unit added and the rest cut off: ties go up, which costs nothing here.
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, low, high);
}

template <int Byte>
inline __m512 byte_to_float(__m512i x) {
    if constexpr (Byte == 3) return _mm512_cvtepi32_ps(_mm512_srli_epi32(x, 24));
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(x, 8 * Byte), _mm512_set1_epi32(255)));
}

void unpack_int8(const uint8_t* group, int padded_inner, uint8_t* out) {
    for (int g = 0; g < padded_inner / kGroup; ++g, group += kInt8GroupBytes)
        for (int h = 0; h < 2; ++h) {
            const __m512 scale = load_bf16(reinterpret_cast<const uint16_t*>(group) + h * 16);
            const __m512 minimum = _mm512_mul_ps(scale, _mm512_set1_ps(-128.0f));
            for (int quad = 0; quad < kGroup / 4; ++quad) {
                const uint8_t* at = group + 2 * kStrip + quad * 128 + h * 64;
                _mm_prefetch((const char*)at + kPrefetchBytes, _MM_HINT_T0);
                const __m512i line = _mm512_load_si512(at);
                const __m512 v0 = _mm512_fmadd_ps(byte_to_float<0>(line), scale, minimum);
                const __m512 v1 = _mm512_fmadd_ps(byte_to_float<1>(line), scale, minimum);
                const __m512 v2 = _mm512_fmadd_ps(byte_to_float<2>(line), scale, minimum);
                const __m512 v3 = _mm512_fmadd_ps(byte_to_float<3>(line), scale, minimum);
                uint8_t* pairs = out + (g * (kGroup / 2) + quad * 2) * 128 + h * 64;
                _mm512_store_si512(pairs, rounded_pairs(v0, v1));
                _mm512_store_si512(pairs + 128, rounded_pairs(v2, v3));
            }
        }
}

void unpack_int4(const uint8_t* group, int padded_inner, uint8_t* out) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int g = 0; g < padded_inner / kGroup; ++g, group += kInt4GroupBytes, out += kGroup * kStrip * 2) {
        for (size_t line = 0; line < kInt4GroupBytes; line += 64)
            _mm_prefetch((const char*)group + kPrefetchBytes + line, _MM_HINT_T0);
        const uint16_t* header = reinterpret_cast<const uint16_t*>(group);
        for (int h = 0; h < 2; ++h) {
            const __m512 scale = load_fp16(header + h * 16), minimum = load_fp16(header + kStrip + h * 16);
            for (int line = 0; line < 4; ++line) {
                const __m512i packed = _mm512_load_si512(group + 128 + h * 256 + line * 64);
                for (int part = 0; part < 2; ++part) {
                    const __m512i q = _mm512_and_si512(part ? _mm512_srli_epi16(packed, 4) : packed, low);
                    const __m512 v0 = _mm512_fmadd_ps(byte_to_float<0>(q), scale, minimum);
                    const __m512 v1 = _mm512_fmadd_ps(byte_to_float<1>(q), scale, minimum);
                    const __m512 v2 = _mm512_fmadd_ps(byte_to_float<2>(q), scale, minimum);
                    const __m512 v3 = _mm512_fmadd_ps(byte_to_float<3>(q), scale, minimum);
                    uint8_t* pairs = out + (part * 8 + line * 2) * 128 + h * 64;
                    _mm512_store_si512(pairs, rounded_pairs(v0, v1));
                    _mm512_store_si512(pairs + 128, rounded_pairs(v2, v3));
                }
            }
        }
    }
}

// --- tiles ----------------------------------------------------------------------------------------

void configure_product_tiles() {
    if (current_tiles == -1) return;
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
    _tile_loadconfig(&config);
    current_tiles = -1;
}

// With so many blocks of rows a strip takes longer to multiply than to read: the next one is asked for meanwhile, and it
// stays in the first cache as far as it fits. With fewer it is read as it is multiplied, and to ask so early pushes the
// cache's keys and values out of theirs. Measured.
constexpr int kManyBlocks = 3;

// A strip's lines, asked for in two streams and as evenly as may be while another is multiplied.
class Ahead {
  public:
    Ahead(const Matrix& matrix, int strip, int num_steps)
        : half_(matrix.strip_bytes / 128 * 64),
          at_(reinterpret_cast<const char*>(matrix.strip(strip))),
          end_(at_ + half_),
          lines_((half_ / 64 + num_steps - 1) / num_steps) {}

    // Once for each of the steps.
    void ask() {
        for (int line = 0; line < lines_ && at_ < end_; ++line, at_ += 64) {
            _mm_prefetch(at_, _MM_HINT_T1);
            _mm_prefetch(at_ + half_, _MM_HINT_T1);
        }
    }

  private:
    size_t half_;
    const char *at_, *end_;
    int lines_;
};

// What is to be read soon while `strip` is.
inline void ask_for(Ahead* ahead, const uint8_t* strip) {
    if (ahead) return ahead->ask();
    for (int line = 0; line < 2048; line += 64) _mm_prefetch((const char*)strip + kPrefetchBytes + line, _MM_HINT_T0);
}

// 16 or 32 rows of x times the strip; the rows are there, if only as padding. With kKeeps the rows are read past the
// first cache and leave it to the strip.
template <bool kKeeps>
void tile_block(const uint8_t* strip, const uint16_t* x, int stride, int num_steps, int rows, Ahead* ahead,
                float* out) {
    const long row_bytes = 2L * stride;
    const uint16_t* lower = x + 16L * stride;
    const auto load_upper = [&](int step) {
        if constexpr (kKeeps)
            _tile_stream_loadd(4, x + step * 32, row_bytes);
        else
            _tile_loadd(4, x + step * 32, row_bytes);
    };
    const auto load_lower = [&](int step) {
        if constexpr (kKeeps)
            _tile_stream_loadd(5, lower + step * 32, row_bytes);
        else
            _tile_loadd(5, lower + step * 32, row_bytes);
    };
    _tile_zero(0);
    _tile_zero(1);
    if (rows <= 16) {
        for (int step = 0; step < num_steps; ++step, strip += 2048) {
            ask_for(ahead, strip);
            load_upper(step);
            _tile_loadd(6, strip, 128);
            _tile_loadd(7, strip + 64, 128);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    } else {
        _tile_zero(2);
        _tile_zero(3);
        for (int step = 0; step < num_steps; ++step, strip += 2048) {
            ask_for(ahead, strip);
            load_upper(step);
            _tile_loadd(6, strip, 128);
            _tile_loadd(7, strip + 64, 128);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            load_lower(step);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, out + 16 * kStrip, 4 * kStrip);
        _tile_stored(3, out + 16 * kStrip + 16, 4 * kStrip);
    }
    _tile_stored(0, out, 4 * kStrip);
    _tile_stored(1, out + 16, 4 * kStrip);
}

void multiply_strip(const Matrix& matrix, const Activations& x, int num_rows, int strip, bool continues, int isa,
                    uint8_t* scratch, const Sink& sink) {
    alignas(64) float values[kRowBlock * kStrip];
    const uint8_t* weights = matrix.strip(strip);
    const bool tiles = uses_tiles(matrix.format, num_rows, isa);
    if (tiles) {
        configure_product_tiles();
        if (matrix.format == Format::kInt8) unpack_int8(weights, matrix.padded_inner, scratch);
        if (matrix.format == Format::kInt4) unpack_int4(weights, matrix.padded_inner, scratch);
        if (matrix.format != Format::kBf16) weights = scratch;
    }
    const int num_steps = matrix.padded_inner / 32, num_blocks = (num_rows + kRowBlock - 1) / kRowBlock;
    Ahead next(matrix, strip + 1, num_blocks * num_steps);
    const bool many = num_blocks >= kManyBlocks;
    Ahead* ahead = continues && many ? &next : nullptr;
    const auto multiply_block = many ? tile_block<true> : tile_block<false>;
    for (int first = 0; first < num_rows; first += kRowBlock) {
        const int rows = num_rows - first < kRowBlock ? num_rows - first : kRowBlock;
        const uint16_t* block = x.bf16 + (size_t)first * x.stride;
        if (tiles) {
            multiply_block(weights, block, x.stride, num_steps, rows, ahead, values);
        } else if (matrix.format == Format::kBf16) {
            bf16_block(weights, block, x.stride, matrix.padded_inner / 2, rows, values);
        } else {
            quantized_block(matrix, strip, x, first, rows, values);
        }
        sink.take(strip, first, rows, values);
    }
}

RowForm row_form(Format format, int num_rows, int isa) {
    return format == Format::kBf16 || uses_tiles(format, num_rows, isa) ? RowForm::kBf16 : RowForm::kInt8;
}

size_t scratch_bytes(const Matrix& matrix) {
    return matrix.format == Format::kBf16 ? 0 : (size_t)matrix.padded_inner * kStrip * 2;
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

const ProductKernels kProducts = {row_form, scratch_bytes, multiply, read_bytes, release_tiles};

}  // namespace quartet::avx512
