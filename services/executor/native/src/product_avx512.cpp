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
constexpr int kVectorRowsInt8 = 6;
constexpr int kVectorRowsInt4 = 11;
// Up to so many rows tiles multiply 8 bits.
constexpr int kMostInt8TileRows = 64;
// How far ahead of its use a strip is asked for.
constexpr int kPrefetchBytes = 4096;
// The same where nothing but reading is done.
constexpr int kReadAhead = 1024;
// Of a row of 8 bits, elements that share a scale where vectors multiply it.
constexpr int kRowGroup = 32;
// Of a strip that tiles read at once: 16 lines of 32 columns.
constexpr int kStepBytes = 2048;

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
        if (g == num_groups - (int)(kPrefetchBytes / kInt8GroupBytes)) asked += ahead;
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

// --- 4 bits as 8 ------------------------------------------------------------------------------------

inline __m512i rounded_up_to_bf16(__m512 x) {
    return _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0xffff)), 16);
}

// Rounded to a 256th, in both 16-bit lanes of a column, `more` added.
inline __m512i in_256ths(__m512 x, int more) {
    const __m512i value = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(256.0f))),
                                           _mm512_set1_epi32(more));
    return _mm512_mask_mov_epi16(value, 0xaaaaaaaa, _mm512_slli_epi32(value, 16));
}

// A strip of kInt4 as one of kInt8. Two groups of 4 bits become one of 8 whose unit is a 127th of its largest value.
void unpack_int4_as_int8(const uint8_t* group, int padded_inner, uint8_t* out) {
    const __m512i low = _mm512_set1_epi16(15), upper = _mm512_set1_epi16(static_cast<short>(0xff00));
    constexpr int kParts = kInt8Group / kInt4Group;
    for (int k = 0; k < padded_inner; k += kInt8Group, group += kParts * kInt4GroupBytes, out += kInt8GroupBytes) {
        for (size_t line = 0; line < kParts * kInt4GroupBytes; line += 64)
            _mm_prefetch((const char*)group + kPrefetchBytes + line, _MM_HINT_T0);
        for (int h = 0; h < 2; ++h) {
            __m512 scale[kParts], minimum[kParts], largest = _mm512_setzero_ps();
            for (int part = 0; part < kParts; ++part) {
                const uint16_t* header = reinterpret_cast<const uint16_t*>(group + part * kInt4GroupBytes) + h * 16;
                scale[part] = load_fp16(header);
                minimum[part] = load_fp16(header + kStrip);
                const __m512 last = _mm512_fmadd_ps(scale[part], _mm512_set1_ps(15.0f), minimum[part]);
                largest = _mm512_max_ps(largest, _mm512_max_ps(_mm512_abs_ps(minimum[part]), _mm512_abs_ps(last)));
            }
            const __m512i bits = rounded_up_to_bf16(_mm512_mul_ps(largest, _mm512_set1_ps(1.0f / 127.0f)));
            _mm256_store_si256((__m256i*)(out + h * 32), _mm512_cvtepi32_epi16(bits));
            const __m512 unit = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
            // The reciprocal of less would not be finite.
            const __mmask16 is_some = _mm512_cmp_ps_mask(unit, _mm512_set1_ps(1e-30f), _CMP_GT_OQ);
            const __m512 inverse = _mm512_maskz_div_ps(is_some, _mm512_set1_ps(1.0f), unit);
            for (int part = 0; part < kParts; ++part) {
                const __m512i step = in_256ths(_mm512_mul_ps(scale[part], inverse), 0);
                const __m512i first = in_256ths(_mm512_mul_ps(minimum[part], inverse), 128);
                const auto unpacked = [&](__m512i even, __m512i odd) {
                    even = _mm512_add_epi16(_mm512_mullo_epi16(_mm512_and_si512(even, low), step), first);
                    odd = _mm512_add_epi16(_mm512_mullo_epi16(_mm512_and_si512(odd, low), step), first);
                    // The upper byte of each: odd & upper | even >> 8.
                    return _mm512_ternarylogic_epi32(odd, upper, _mm512_srli_epi16(even, 8), 0xea);
                };
                for (int line = 0; line < 4; ++line) {
                    const __m512i packed =
                        _mm512_load_si512(group + part * kInt4GroupBytes + 128 + h * 256 + line * 64);
                    uint8_t* quad = out + 2 * kStrip + (part * 8 + line) * 128 + h * 64;
                    _mm512_store_si512(quad, unpacked(packed, _mm512_srli_epi16(packed, 8)));
                    _mm512_store_si512(quad + 4 * 128,
                                       unpacked(_mm512_srli_epi16(packed, 4), _mm512_srli_epi16(packed, 12)));
                }
            }
        }
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

template <int Byte>
inline __m512 signed_byte_to_float(__m512i x) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 24 - 8 * Byte), 24));
}

void unpack_int8_as_bf16(const uint8_t* group, int padded_inner, uint8_t* out) {
    for (int g = 0; g < padded_inner / kInt8Group; ++g, group += kInt8GroupBytes)
        for (int h = 0; h < 2; ++h) {
            const __m512 scale = load_bf16(reinterpret_cast<const uint16_t*>(group) + h * 16);
            for (int quad = 0; quad < kInt8Group / 4; ++quad) {
                const uint8_t* at = group + 2 * kStrip + quad * 128 + h * 64;
                _mm_prefetch((const char*)at + kPrefetchBytes, _MM_HINT_T0);
                const __m512i line = _mm512_load_si512(at);
                const __m512 v0 = _mm512_mul_ps(signed_byte_to_float<0>(line), scale);
                const __m512 v1 = _mm512_mul_ps(signed_byte_to_float<1>(line), scale);
                const __m512 v2 = _mm512_mul_ps(signed_byte_to_float<2>(line), scale);
                const __m512 v3 = _mm512_mul_ps(signed_byte_to_float<3>(line), scale);
                uint8_t* pairs = out + (g * (kInt8Group / 2) + quad * 2) * 128 + h * 64;
                _mm512_store_si512(pairs, rounded_pairs(v0, v1));
                _mm512_store_si512(pairs + 128, rounded_pairs(v2, v3));
            }
        }
}

void unpack_int4_as_bf16(const uint8_t* group, int padded_inner, uint8_t* out) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int g = 0; g < padded_inner / kInt4Group; ++g, group += kInt4GroupBytes, out += kInt4Group * kStrip * 2) {
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

// What is asked for meanwhile: the next strip, more of the one that is multiplied, or nothing.
struct Prefetch {
    Ahead* ahead;
    bool more;

    void ask(const uint8_t* lines) const {
        if (ahead) return ahead->ask();
        if (!more) return;
        for (int line = 0; line < kStepBytes; line += 64)
            _mm_prefetch((const char*)lines + kPrefetchBytes + line, _MM_HINT_T0);
    }
};

// What a product by tiles reads: rows of bf16, or of 8 bits in groups of kInt8Group.
struct TileRows {
    const uint8_t* first;
    long row_bytes;
    const float* scales;  // of 8 bits
    int group_stride;
    int num_rows;  // 1 to 32; as many as fill tiles are there, if only as padding
};

// Tiles 0 to 3 become 32 rows times so many steps of the strip, 0 and 1 the first 16 of them; a step is the 64 bytes of a
// tile's row. With kKeeps the rows are read past the first cache and leave it to the strip.
template <bool kInt8, bool kKeeps>
inline void multiply_tiles(const uint8_t* lines, const uint8_t* x, const TileRows& rows, int num_steps,
                           const Prefetch& prefetch) {
    const uint8_t* lower = x + 16 * rows.row_bytes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < num_steps; ++step, lines += kStepBytes, x += 64, lower += 64) {
        prefetch.ask(lines);
        if constexpr (kKeeps)
            _tile_stream_loadd(4, x, rows.row_bytes);
        else
            _tile_loadd(4, x, rows.row_bytes);
        _tile_loadd(6, lines, 128);
        _tile_loadd(7, lines + 64, 128);
        if constexpr (kInt8) {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
        } else {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (rows.num_rows <= 16) continue;
        if constexpr (kKeeps)
            _tile_stream_loadd(5, lower, rows.row_bytes);
        else
            _tile_loadd(5, lower, rows.row_bytes);
        if constexpr (kInt8) {
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        } else {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

// [32][kStrip] of 32 bits.
inline void store_tiles(void* out, int num_rows) {
    uint8_t* bytes = static_cast<uint8_t*>(out);
    _tile_stored(0, bytes, 4 * kStrip);
    _tile_stored(1, bytes + 64, 4 * kStrip);
    if (num_rows <= 16) return;
    _tile_stored(2, bytes + 16 * 4 * kStrip, 4 * kStrip);
    _tile_stored(3, bytes + 16 * 4 * kStrip + 64, 4 * kStrip);
}

template <bool kKeeps>
void bf16_tiles(const uint8_t* strip, const TileRows& rows, int num_steps, const Prefetch& prefetch, float* out) {
    multiply_tiles<false, kKeeps>(strip, rows.first, rows, num_steps, prefetch);
    store_tiles(out, rows.num_rows);
}

template <bool kKeeps>
void int8_tiles(const uint8_t* strip, const TileRows& rows, int num_groups, const Prefetch& prefetch, float* out) {
    alignas(64) int32_t sums[kRowBlock * kStrip];
    for (int i = 0; i < rows.num_rows * kStrip; i += 16) _mm512_store_ps(out + i, _mm512_setzero_ps());
    for (int g = 0; g < num_groups; ++g, strip += kInt8GroupBytes) {
        multiply_tiles<true, kKeeps>(strip + 2 * kStrip, rows.first + g * kInt8Group, rows, 1, prefetch);
        store_tiles(sums, rows.num_rows);
        const uint16_t* header = reinterpret_cast<const uint16_t*>(strip);
        const __m512 s0 = load_bf16(header), s1 = load_bf16(header + 16);
        for (int r = 0; r < rows.num_rows; ++r) {
            const __m512 scale = _mm512_set1_ps(rows.scales[r * rows.group_stride + g]);
            const auto add_to = [&](float* total, const int32_t* sum, __m512 column_scale) {
                const __m512 units = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sum)), scale);
                _mm512_store_ps(total, _mm512_fmadd_ps(units, column_scale, _mm512_load_ps(total)));
            };
            add_to(out + r * kStrip, sums + r * kStrip, s0);
            add_to(out + r * kStrip + 16, sums + r * kStrip + 16, s1);
        }
    }
}

// Whether tiles multiply rows of bf16. To unpack weights for it pays with many rows, which 8 bits ask to be rounded.
bool multiplies_bf16(Format format, int num_rows) { return format == Format::kBf16 || num_rows > kMostInt8TileRows; }

using Unpack = void (*)(const uint8_t* strip, int padded_inner, uint8_t* out);

// What makes of a strip what the tiles read; null where they read it as it is.
Unpack unpacks(Format format, bool as_bf16) {
    if (format == Format::kInt8) return as_bf16 ? unpack_int8_as_bf16 : nullptr;
    if (format == Format::kInt4) return as_bf16 ? unpack_int4_as_bf16 : unpack_int4_as_int8;
    return nullptr;
}

template <bool kKeeps>
void multiply_strip_by_tiles(const Matrix& matrix, const Activations& x, int num_rows, int strip, bool continues,
                             uint8_t* scratch, const Sink& sink) {
    alignas(64) float values[kRowBlock * kStrip];
    const bool is_bf16 = multiplies_bf16(matrix.format, num_rows);
    const uint8_t* weights = matrix.strip(strip);
    configure_product_tiles();
    if (const Unpack unpack = unpacks(matrix.format, is_bf16)) {
        unpack(weights, matrix.padded_inner, scratch);
        weights = scratch;
    }
    const int num_steps = matrix.padded_inner / (is_bf16 ? 32 : kInt8Group);
    Ahead next(matrix, strip + 1, (num_rows + kRowBlock - 1) / kRowBlock * num_steps);
    const Prefetch prefetch{continues && kKeeps ? &next : nullptr, weights != scratch};
    for (int first = 0; first < num_rows; first += kRowBlock) {
        const int rows = num_rows - first < kRowBlock ? num_rows - first : kRowBlock;
        if (is_bf16) {
            const auto* begin = reinterpret_cast<const uint8_t*>(x.bf16 + (size_t)first * x.stride);
            bf16_tiles<kKeeps>(weights, {begin, 2L * x.stride, nullptr, 0, rows}, num_steps, prefetch, values);
        } else {
            const auto* begin = reinterpret_cast<const uint8_t*>(x.int8 + (size_t)first * x.int8_stride);
            const float* scales = x.scales + (size_t)first * x.group_stride;
            int8_tiles<kKeeps>(weights, {begin, x.int8_stride, scales, x.group_stride, rows}, num_steps, prefetch,
                               values);
        }
        sink.take(strip, first, rows, values);
    }
}

void multiply_strip(const Matrix& matrix, const Activations& x, int num_rows, int strip, bool continues, int isa,
                    uint8_t* scratch, const Sink& sink) {
    if (uses_tiles(matrix.format, num_rows, isa)) {
        const bool many = num_rows > (kManyBlocks - 1) * kRowBlock;
        const auto multiply_by_tiles = many ? multiply_strip_by_tiles<true> : multiply_strip_by_tiles<false>;
        return multiply_by_tiles(matrix, x, num_rows, strip, continues, scratch, sink);
    }
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
    const bool tiles = uses_tiles(format, num_rows, isa);
    if (format == Format::kBf16 || (tiles && multiplies_bf16(format, num_rows))) return RowForm::kBf16;
    return tiles ? RowForm::kInt8By64 : RowForm::kInt8By32;
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
