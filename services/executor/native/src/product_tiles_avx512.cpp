#include "product_tiles.h"
#include "simd.h"
#include "tiles.h"

namespace quartet::avx512 {

thread_local int current_tiles = 0;

namespace {

// Of a strip that tiles read at once: 16 lines of 32 columns.
constexpr int kStepBytes = 2048;

// --- 4 bits as 8 ----------------------------------------------------------------------------------

// Of what is not negative.
inline __m512i rounded_up_to_bf16(__m512 x) {
    return _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0xffff)), 16);
}

// The larger magnitude, NaN where either is that.
inline __m512 larger_magnitude(__m512 magnitude, __m512 x) {
    const __m512i other = _mm512_castps_si512(_mm512_abs_ps(x));
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(magnitude), other));
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
                largest = larger_magnitude(larger_magnitude(largest, minimum[part]), last);
            }
            const __m512i bits = rounded_up_to_bf16(_mm512_mul_ps(largest, _mm512_set1_ps(1.0f / 127.0f)));
            _mm256_store_si256((__m256i*)(out + h * 32), _mm512_cvtepi32_epi16(bits));
            const __m512 unit = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
            const __mmask16 is_some = _mm512_cmp_ps_mask(unit, _mm512_setzero_ps(), _CMP_NEQ_UQ);
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
// Up to so many rows tiles multiply 8 bits: with more it takes less to unpack weights to bf16 than to round rows and to
// scale each group's sums.
constexpr int kMostInt8Rows = (kManyBlocks - 1) * kRowBlock;

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
    size_t num_bytes;  // of more

    void ask(const uint8_t* lines) const {
        if (ahead) return ahead->ask();
        for (size_t line = 0; line < num_bytes; line += 64)
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
template <bool kBytes, bool kKeeps>
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
        if constexpr (kBytes) {
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
        if constexpr (kBytes) {
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

void int8_tiles(const uint8_t* strip, const TileRows& rows, int num_groups, const Prefetch& prefetch, float* out) {
    alignas(64) int32_t sums[kRowBlock * kStrip];
    for (int i = 0; i < rows.num_rows * kStrip; i += 16) _mm512_store_ps(out + i, _mm512_setzero_ps());
    for (int g = 0; g < num_groups; ++g, strip += kInt8GroupBytes) {
        multiply_tiles<true, false>(strip + 2 * kStrip, rows.first + g * kInt8Group, rows, 1, prefetch);
        store_tiles(sums, rows.num_rows);
        const uint16_t* header = reinterpret_cast<const uint16_t*>(strip);
        const __m512 s0 = load_bf16(header), s1 = load_bf16(header + 16);
        for (int r = 0; r < rows.num_rows; ++r) {
            const __m512 scale = _mm512_set1_ps(rows.scales[r * rows.group_stride + g]);
            const auto add_to = [&](float* total, const int32_t* sum, __m512 column_scale) {
                const __m512 units = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sum)), column_scale);
                _mm512_store_ps(total, _mm512_fmadd_ps(units, scale, _mm512_load_ps(total)));
            };
            add_to(out + r * kStrip, sums + r * kStrip, s0);
            add_to(out + r * kStrip + 16, sums + r * kStrip + 16, s1);
        }
    }
}

using Unpack = void (*)(const uint8_t* strip, int padded_inner, uint8_t* out);

// What makes of a strip what the tiles read; null where they read it as it is.
Unpack unpacks(Format format, bool as_bf16) {
    if (format == Format::kInt8) return as_bf16 ? unpack_int8_as_bf16 : nullptr;
    if (format == Format::kInt4) return as_bf16 ? unpack_int4_as_bf16 : unpack_int4_as_int8;
    return nullptr;
}

template <bool kKeeps>
void multiply_blocks(const Matrix& matrix, const Activations& x, int num_rows, int strip, bool continues,
                     uint8_t* scratch, const Sink& sink) {
    alignas(64) float values[kRowBlock * kStrip];
    const bool is_bf16 = tile_row_form(matrix.format, num_rows) == RowForm::kBf16;
    const uint8_t* weights = matrix.strip(strip);
    configure_product_tiles();
    if (const Unpack unpack = unpacks(matrix.format, is_bf16)) {
        unpack(weights, matrix.padded_inner, scratch);
        weights = scratch;
    }
    const int num_steps = matrix.padded_inner / (is_bf16 ? 32 : kInt8Group);
    Ahead next(matrix, strip + 1, (num_rows + kRowBlock - 1) / kRowBlock * num_steps);
    const size_t step_bytes = is_bf16 ? kStepBytes : kInt8GroupBytes;
    const Prefetch prefetch{continues && kKeeps ? &next : nullptr, weights == scratch ? 0 : step_bytes};
    for (int first = 0; first < num_rows; first += kRowBlock) {
        const int rows = num_rows - first < kRowBlock ? num_rows - first : kRowBlock;
        if (is_bf16) {
            const auto* begin = reinterpret_cast<const uint8_t*>(x.bf16 + (size_t)first * x.stride);
            bf16_tiles<kKeeps>(weights, {begin, 2L * x.stride, nullptr, 0, rows}, num_steps, prefetch, values);
        } else {
            const auto* begin = reinterpret_cast<const uint8_t*>(x.int8 + (size_t)first * x.int8_stride);
            const float* scales = x.scales + (size_t)first * x.group_stride;
            int8_tiles(weights, {begin, x.int8_stride, scales, x.group_stride, rows}, num_steps, prefetch, values);
        }
        sink.take(strip, first, rows, values);
    }
}

}  // namespace

RowForm tile_row_form(Format format, int num_rows) {
    return format == Format::kBf16 || num_rows > kMostInt8Rows ? RowForm::kBf16 : RowForm::kInt8By64;
}

size_t tile_scratch_bytes(const Matrix& matrix) {
    return matrix.format == Format::kBf16 ? 0 : (size_t)matrix.padded_inner * kStrip * 2;
}

void multiply_strip_by_tiles(const Matrix& matrix, const Activations& x, int num_rows, int strip, bool continues,
                             uint8_t* scratch, const Sink& sink) {
    const bool many = num_rows > (kManyBlocks - 1) * kRowBlock;
    (many ? multiply_blocks<true> : multiply_blocks<false>)(matrix, x, num_rows, strip, continues, scratch, sink);
}

void release_tiles() {
    if (current_tiles != 0) {
        _tile_release();
        current_tiles = 0;
    }
}

}  // namespace quartet::avx512
