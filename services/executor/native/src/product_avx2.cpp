#include "cpu.h"
#include "matrix.h"
#include "simd.h"

namespace quartet::avx2 {
namespace {

// How far ahead of its use a strip is asked for.
constexpr int kPrefetchBytes = 4096;
// The same where nothing but reading is done.
constexpr int kReadAhead = 1024;
// Rows whose sums of two vectors stay in registers.
constexpr int kMostFloatRows = 6;
constexpr int kMostInt8Rows = 4;
constexpr int kMostVnniRows = 6;

// Rows are taken in parts of like size, no larger than Most.
template <int Most, class Body>
void in_parts(int rows, const Body& body) {
    for (int first = 0, parts = (rows + Most - 1) / Most; parts > 0; --parts) {
        const int count = (rows - first + parts - 1) / parts;
        body(first, count);
        first += count;
    }
}

#define ALWAYS_INLINE inline __attribute__((always_inline))

// Inline in any case: GCC takes calls of a function that does nothing but this for ones without effect.
ALWAYS_INLINE void ask(const uint8_t* at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0); }

// --- bf16 -----------------------------------------------------------------------------------------

// Pairs of k of 8 columns: the even one, or the odd one, as floats.
inline __m256 even_half(const uint8_t* pairs) {
    return as_floats(_mm256_slli_epi32(_mm256_load_si256((const __m256i*)pairs), 16));
}
inline __m256 odd_half(const uint8_t* pairs, __m256i upper) {
    return as_floats(_mm256_and_si256(_mm256_load_si256((const __m256i*)pairs), upper));
}

// Vectors [first, first + Vectors) of 8 columns, of `Strips` strips side by side: one stream of reads does not fill the
// memory's queue.
template <int Rows, int Vectors, int Strips = 1>
void bf16_rows(const uint8_t* strip, const float* x, int stride, int num_pairs, int first, float* out) {
    __m256 sum[Strips][Rows][Vectors];
    for (auto& part : sum)
        for (auto& row : part)
            for (auto& one : row) one = _mm256_setzero_ps();
    const size_t strip_bytes = (size_t)num_pairs * 128;
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    strip += first * 32;
    for (int pair = 0; pair < num_pairs; ++pair, strip += 128, x += 2) {
#pragma GCC unroll 4
        for (int s = 0; s < Strips; ++s)
            for (int line = 0; line < Vectors; line += 2) ask(strip + s * strip_bytes + line * 32 + kPrefetchBytes);
        // The odd halves are read again: there are too few registers to keep them.
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half)
#pragma GCC unroll 4
            for (int s = 0; s < Strips; ++s) {
                __m256 w[Vectors];
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; ++v) {
                    const uint8_t* at = strip + s * strip_bytes + v * 32;
                    w[v] = half ? odd_half(at, upper) : even_half(at);
                }
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r) {
                    const __m256 a = _mm256_broadcast_ss(x + (size_t)r * stride + half);
#pragma GCC unroll 4
                    for (int v = 0; v < Vectors; ++v) accumulate(sum[s][r][v], w[v], a);
                }
            }
    }
    for (int s = 0; s < Strips; ++s)
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < Vectors; ++v)
                _mm256_storeu_ps(out + (s * Rows + r) * kStrip + (first + v) * 8, sum[s][r][v]);
}

template <int Rows>
void bf16_strip(const uint8_t* strip, const float* x, int stride, int num_pairs, float* out) {
    if constexpr (Rows <= 3) {
        bf16_rows<Rows, 4>(strip, x, stride, num_pairs, 0, out);
    } else {
        bf16_rows<Rows, 2>(strip, x, stride, num_pairs, 0, out);
        bf16_rows<Rows, 2>(strip, x, stride, num_pairs, 2, out);
    }
}

void bf16_block(const uint8_t* strip, const Activations& a, int first_row, int num_rows, int num_pairs, float* values) {
    in_parts<kMostFloatRows>(num_rows, [&](int first, int rows) {
        const float* x = a.floats + (size_t)(first_row + first) * a.stride;
        float* out = values + first * kStrip;
        switch (rows) {
            case 1: return bf16_strip<1>(strip, x, a.stride, num_pairs, out);
            case 2: return bf16_strip<2>(strip, x, a.stride, num_pairs, out);
            case 3: return bf16_strip<3>(strip, x, a.stride, num_pairs, out);
            case 4: return bf16_strip<4>(strip, x, a.stride, num_pairs, out);
            case 5: return bf16_strip<5>(strip, x, a.stride, num_pairs, out);
            case 6: return bf16_strip<6>(strip, x, a.stride, num_pairs, out);
        }
    });
}

// --- quantised weights and rows -------------------------------------------------------------------

inline __m256i broadcast4(const void* p) {
    int32_t value;
    std::memcpy(&value, p, sizeof value);
    return _mm256_set1_epi32(value);
}

// AVX-VNNI. By hand, so that nothing else of this file is compiled to it.
inline void dot_int8(__m256i& sum, __m256i unsigned_bytes, __m256i signed_bytes) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(unsigned_bytes), "x"(signed_bytes));
}

// By hand too: GCC would add up in the shape of a tree, for which there are too few registers.
inline void add_ints(__m256i& sum, __m256i x) { __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(x)); }
inline void add_words(__m256i& sum, __m256i x) { __asm__("vpaddw %1, %0, %0" : "+x"(sum) : "x"(x)); }

// Sums of pairs of 16 bits.
inline __m256i sum_pairs(__m256i words) { return _mm256_madd_epi16(words, _mm256_set1_epi16(1)); }

// One group of some rows.
struct Group {
    const int8_t* units_;
    const float* scales_;
    const int32_t* sums_;
    ptrdiff_t stride, group_stride;

    Group(const Activations& x, int first_row)
        : units_(x.int8 + (size_t)first_row * x.int8_stride),
          scales_(x.scales + (size_t)first_row * x.group_stride),
          sums_(x.sums + (size_t)first_row * x.group_stride),
          stride(x.int8_stride),
          group_stride(x.group_stride) {}

    void next() { units_ += kRowGroup, ++scales_, ++sums_; }
    const int8_t* units(int row) const { return units_ + row * stride; }
    float scale(int row) const { return scales_[row * group_stride]; }
    int sum(int row) const { return sums_[row * group_stride]; }
};

// As bf16_rows, of the rows' group `part` of the weights'; out has been set to 0.
template <bool Vnni, int Rows, int Vectors>
ALWAYS_INLINE void int8_group(const uint8_t* group, int part, const Group& x, int first, float* out) {
    __m256i sum[Rows][Vectors];
    const uint8_t* lines = group + 2 * kStrip + part * (kRowGroup / 4) * 128 + first * 32;
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v)
            // Weights are multiplied as if they were 128 larger.
            sum[r][v] = Vnni ? _mm256_set1_epi32(-128 * x.sum(r)) : _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int quad = 0; quad < kRowGroup / 4; ++quad) {
        for (int line = 0; line < Vectors; line += 2) ask(lines + quad * 128 + line * 32 + kPrefetchBytes);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) {
            const __m256i w = _mm256_load_si256((const __m256i*)(lines + quad * 128 + v * 32));
            const __m256i larger = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
            // Products of signs on one side only cannot exceed 16 bits: 2 * 127 * 127.
            const __m256i size = _mm256_abs_epi8(w);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const __m256i a = broadcast4(x.units(r) + quad * 4);
                if constexpr (Vnni)
                    dot_int8(sum[r][v], larger, a);
                else
                    add_ints(sum[r][v], sum_pairs(_mm256_maddubs_epi16(size, _mm256_sign_epi8(a, w))));
            }
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
        const __m256 scale = widened(_mm_loadu_si128((const __m128i*)group + first + v));
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            float* total = out + r * kStrip + (first + v) * 8;
            const __m256 units = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[r][v]), scale);
            const __m256 unit = _mm256_set1_ps(x.scale(r));
            _mm256_storeu_ps(total, _mm256_fmadd_ps(units, unit, _mm256_loadu_ps(total)));
        }
    }
}

// Columns [16 * half, 16 * half + 16).
template <bool Vnni, int Rows>
ALWAYS_INLINE void int4_group(const uint8_t* group, const Group& x, int half, float* out) {
    const __m256i low = _mm256_set1_epi8(15);
    const uint8_t* lines = group + 4 * kStrip + half * 256;
    // Without VNNI sums of 16 products, of 16 bits: no more than 16 * 15 * 127.
    __m256i sum[Rows][2];
    for (auto& row : sum) row[0] = row[1] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) {
        ask(lines + line * 64 + kPrefetchBytes);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            const __m256i packed = _mm256_load_si256((const __m256i*)(lines + line * 64 + v * 32));
            const __m256i w0 = _mm256_and_si256(packed, low), w1 = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const int8_t* units = x.units(r) + line * 4;
                const __m256i a0 = broadcast4(units), a1 = broadcast4(units + 16);
                if constexpr (Vnni) {
                    dot_int8(sum[r][v], w0, a0);
                    dot_int8(sum[r][v], w1, a1);
                } else {
                    add_words(sum[r][v], _mm256_maddubs_epi16(w0, a0));
                    add_words(sum[r][v], _mm256_maddubs_epi16(w1, a1));
                }
            }
        }
    }
    ask(group + half * 64 + kPrefetchBytes);
    const uint16_t* header = reinterpret_cast<const uint16_t*>(group) + half * 16;
    const Floats scale = load_fp16(header), minimum = load_fp16(header + kStrip);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        const Floats units = {_mm256_cvtepi32_ps(Vnni ? sum[r][0] : sum_pairs(sum[r][0])),
                              _mm256_cvtepi32_ps(Vnni ? sum[r][1] : sum_pairs(sum[r][1]))};
        const Floats product = fma(units, scale, mul(minimum, all((float)x.sum(r))));
        float* total = out + r * kStrip + half * 16;
        store(total, fma(product, all(x.scale(r)), load(total)));
    }
}

template <bool Vnni, int Rows>
void quantized_rows(const Matrix& matrix, int strip, const Activations& x, int first_row, float* out) {
    for (int i = 0; i < Rows * kStrip; i += 16) store(out + i, zeros());
    const uint8_t* weights = matrix.strip(strip);
    Group group(x, first_row);
    if (matrix.format == Format::kInt8) {
        for (int g = 0; g < matrix.padded_inner / kInt8Group; ++g, weights += kInt8GroupBytes)
            for (int part = 0; part < kInt8Group / kRowGroup; ++part, group.next()) {
                if constexpr (Rows <= 2) {
                    int8_group<Vnni, Rows, 4>(weights, part, group, 0, out);
                } else {
                    int8_group<Vnni, Rows, 2>(weights, part, group, 0, out);
                    int8_group<Vnni, Rows, 2>(weights, part, group, 2, out);
                }
            }
    } else {
        for (int g = 0; g < matrix.padded_inner / kInt4Group; ++g, weights += kInt4GroupBytes, group.next()) {
            int4_group<Vnni, Rows>(weights, group, 0, out);
            int4_group<Vnni, Rows>(weights, group, 1, out);
        }
    }
}

template <bool Vnni>
void quantized_block(const Matrix& matrix, int strip, const Activations& x, int first_row, int num_rows, float* values) {
    in_parts<Vnni ? kMostVnniRows : kMostInt8Rows>(num_rows, [&](int first, int rows) {
        float* out = values + first * kStrip;
        switch (rows) {
            case 1: return quantized_rows<Vnni, 1>(matrix, strip, x, first_row + first, out);
            case 2: return quantized_rows<Vnni, 2>(matrix, strip, x, first_row + first, out);
            case 3: return quantized_rows<Vnni, 3>(matrix, strip, x, first_row + first, out);
            case 4: return quantized_rows<Vnni, 4>(matrix, strip, x, first_row + first, out);
        }
        if constexpr (Vnni) {
            if (rows == 5) return quantized_rows<Vnni, 5>(matrix, strip, x, first_row + first, out);
            if (rows == 6) return quantized_rows<Vnni, 6>(matrix, strip, x, first_row + first, out);
        }
    });
}

// One row of int8 against strips side by side.
template <bool Vnni>
void int8_together(const Matrix& matrix, int strip, const Activations& x, float* out) {
    for (int i = 0; i < kStripsTogether * kStrip; i += 16) store(out + i, zeros());
    const uint8_t* weights = matrix.strip(strip);
    Group group(x, 0);
    for (int g = 0; g < matrix.padded_inner / kInt8Group; ++g, weights += kInt8GroupBytes)
        for (int part = 0; part < kInt8Group / kRowGroup; ++part, group.next())
            for (int s = 0; s < kStripsTogether; ++s)
                int8_group<Vnni, 1, 4>(weights + s * matrix.strip_bytes, part, group, 0, out + s * kStrip);
}

// --- the table ------------------------------------------------------------------------------------

RowForm row_form(Format format, int, int) { return format == Format::kBf16 ? RowForm::kFloat : RowForm::kInt8By32; }

size_t scratch_bytes(const Matrix&) { return 0; }

void multiply(const Matrix& matrix, const Activations& x, int num_rows, int strip, int end, bool, int isa, uint8_t*,
              const Sink& sink) {
    alignas(64) float values[kRowBlock * kStrip];
    const bool vnni = isa & kAvxVnni;
    if (num_rows == 1 && matrix.format != Format::kInt4) {
        for (; strip + kStripsTogether <= end; strip += kStripsTogether) {
            if (matrix.format == Format::kBf16)
                bf16_rows<1, 4, kStripsTogether>(matrix.strip(strip), x.floats, x.stride, matrix.padded_inner / 2, 0,
                                                 values);
            else
                vnni ? int8_together<true>(matrix, strip, x, values) : int8_together<false>(matrix, strip, x, values);
            for (int s = 0; s < kStripsTogether; ++s) sink.take(strip + s, 0, 1, values + s * kStrip);
        }
    }
    for (; strip < end; ++strip)
        for (int first = 0; first < num_rows; first += kRowBlock) {
            const int rows = num_rows - first < kRowBlock ? num_rows - first : kRowBlock;
            if (matrix.format == Format::kBf16)
                bf16_block(matrix.strip(strip), x, first, rows, matrix.padded_inner / 2, values);
            else
                vnni ? quantized_block<true>(matrix, strip, x, first, rows, values)
                     : quantized_block<false>(matrix, strip, x, first, rows, values);
            sink.take(strip, first, rows, values);
        }
}

void read_bytes(const uint8_t* data, size_t num_bytes) {
    __m256i sum[8] = {};
    const size_t part = num_bytes / 4;
    for (size_t at = 0; at < part; at += 64)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const uint8_t* line = data + i * part + at;
            ask(line + kReadAhead);
            sum[2 * i] = _mm256_xor_si256(sum[2 * i], _mm256_load_si256((const __m256i*)line));
            sum[2 * i + 1] = _mm256_xor_si256(sum[2 * i + 1], _mm256_load_si256((const __m256i*)(line + 32)));
        }
    for (auto& one : sum) __asm__ volatile("" : : "x"(one));
}

void release_tiles() {}

}  // namespace

const ProductKernels kProducts = {row_form, scratch_bytes, multiply, read_bytes, release_tiles};

}  // namespace quartet::avx2
