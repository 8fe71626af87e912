// simd.h for AVX-512 with BF16.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define QUARTET_ISA avx512

namespace quartet::avx512 {

constexpr bool kHasTiles = true;
constexpr int kRegisters = 32;  // that hold Floats

using Floats = __m512;
using Ints = __m512i;
using Mask = __mmask16;

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fms(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
// Where either is NaN these give the second.
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats abs(Floats x) { return _mm512_abs_ps(x); }
inline Floats nearest(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x * 2^whole, whole in [-126, 127].
inline Floats times_power(Floats x, Floats whole) { return _mm512_scalef_ps(x, whole); }
// To some 12 bits.
inline Floats about_reciprocal(Floats x) { return _mm512_rcp14_ps(x); }
inline float first(Floats x) { return _mm512_cvtss_f32(x); }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }

// --- masks ----------------------------------------------------------------------------------------

inline Mask first_lanes(int count) { return count >= 16 ? (Mask)0xffff : (Mask)((1u << (count < 0 ? 0 : count)) - 1); }
inline Mask less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Mask less_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
inline Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask unordered(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
inline Mask less_equal(Ints a, Ints b) { return _mm512_cmple_epi32_mask(a, b); }
inline Mask both(Mask a, Mask b) { return a & b; }
inline Mask either(Mask a, Mask b) { return a | b; }
inline Mask inverse(Mask a) { return (Mask)~a; }
inline unsigned bits(Mask mask) { return mask; }

inline Floats load_or(const float* p, int count, Floats rest) {
    return _mm512_mask_loadu_ps(rest, first_lanes(count), p);
}
// The first `count` lanes, the others 0.
inline Floats load_some(const float* p, int count) { return _mm512_maskz_loadu_ps(first_lanes(count), p); }
inline void store_some(float* p, Floats x, int count) { _mm512_mask_storeu_ps(p, first_lanes(count), x); }
inline void store_where(float* p, Mask mask, Floats x) { _mm512_mask_storeu_ps(p, mask, x); }

// --- 16 and 8 bits --------------------------------------------------------------------------------

inline Floats load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
// Of bf16 values without their signs, their number a multiple of 32: eight among which the largest is.
inline __m128i largest_magnitudes(const uint16_t* p, int count) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __m512i most = _mm512_setzero_si512();
    for (int i = 0; i < count; i += 32)
        most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(p + i), magnitude));
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    return _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
inline __m256i to_bf16(Floats x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline void store_bf16(uint16_t* p, Floats x) { _mm256_storeu_si256((__m256i*)p, to_bf16(x)); }
inline void store_bf16_some(uint16_t* p, Floats x, int count) {
    _mm256_mask_storeu_epi16(p, first_lanes(count), to_bf16(x));
}
// The 16 values to every second place of 32, the even ones or the odd; what is between them is not written.
inline void store_every_second(uint16_t* p, const uint16_t* values, bool odd) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)values));
    wide = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
    _mm512_mask_storeu_epi16(p, odd ? 0xaaaaaaaa : 0x55555555, wide);
}
inline Floats load_fp16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

inline Ints all_ints(int x) { return _mm512_set1_epi32(x); }
inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline void store_ints(void* p, Ints x) { _mm512_storeu_si512(p, x); }
inline Ints lane_numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints bits_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline int sum(Ints x) { return _mm512_reduce_add_epi32(x); }
inline Ints nearest_ints(Floats x) { return _mm512_cvtps_epi32(x); }
inline void store_int8(int8_t* p, Ints x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(x)); }

// Four bytes in every lane.
inline __m512i broadcast4(const void* p) {
    int32_t value;
    std::memcpy(&value, p, sizeof value);
    return _mm512_set1_epi32(value);
}

// --- attention: products of pairs of bf16 ---------------------------------------------------------

// What the cache's lines are multiplied with is kept as this, pairs beside each other.
using Operand = uint16_t;
// A line of 16 pairs is multiplied in so many steps.
constexpr int kParts = 1;
using Line = __m512i;
using Pair = __m512i;

inline void store_operands(Operand* p, Floats x) { store_bf16(p, x); }
inline void copy_operands(Operand* p, const uint16_t* values, int count) { std::memcpy(p, values, 2 * (size_t)count); }
inline Line load_line(const uint16_t* p, int) { return _mm512_loadu_si512(p); }
inline Pair load_pair(const Operand* p, int) { return broadcast4(p); }
inline Floats dot_bf16(Floats sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
inline Floats dot(Floats sum, Line line, Pair pair) { return dot_bf16(sum, line, pair); }

// What is left of x above its floor; x becomes a power for times_power, which takes the floor itself.
inline Floats split_power(Floats& x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }

// --- sampling -------------------------------------------------------------------------------------

struct Doubles {  // 16 too
    __m512d low, high;
};

inline Doubles all_doubles(double x) { return {_mm512_set1_pd(x), _mm512_set1_pd(x)}; }
inline Doubles load_doubles(const double* p) { return {_mm512_loadu_pd(p), _mm512_loadu_pd(p + 8)}; }
inline void store(double* p, Doubles x) { _mm512_storeu_pd(p, x.low), _mm512_storeu_pd(p + 8, x.high); }
inline Doubles to_doubles(Floats x) {
    return {_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))};
}
inline Doubles add(Doubles a, Doubles b) { return {_mm512_add_pd(a.low, b.low), _mm512_add_pd(a.high, b.high)}; }
inline Doubles mul(Doubles a, Doubles b) { return {_mm512_mul_pd(a.low, b.low), _mm512_mul_pd(a.high, b.high)}; }
inline Doubles fma(Doubles a, Doubles b, Doubles c) {
    return {_mm512_fmadd_pd(a.low, b.low, c.low), _mm512_fmadd_pd(a.high, b.high, c.high)};
}
inline Doubles fms(Doubles a, Doubles b, Doubles c) {
    return {_mm512_fmsub_pd(a.low, b.low, c.low), _mm512_fmsub_pd(a.high, b.high, c.high)};
}
inline Doubles nearest(Doubles x) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm512_roundscale_pd(x.low, kMode), _mm512_roundscale_pd(x.high, kMode)};
}
inline Doubles times_power(Doubles x, Doubles whole) {
    return {_mm512_scalef_pd(x.low, whole.low), _mm512_scalef_pd(x.high, whole.high)};
}
// 0 in the other lanes.
inline Doubles where(Mask mask, Doubles x) {
    return {_mm512_maskz_mov_pd(mask & 0xff, x.low), _mm512_maskz_mov_pd(mask >> 8, x.high)};
}
inline double sum(Doubles x) { return _mm512_reduce_add_pd(_mm512_add_pd(x.low, x.high)); }

// The mask's lanes beside each other; up to 16 are written.
inline void store_packed(float* p, Mask mask, Floats x) { _mm512_storeu_ps(p, _mm512_maskz_compress_ps(mask, x)); }
inline void store_packed(int32_t* p, Mask mask, Ints x) {
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(mask, x));
}
inline void store_packed(double* p, Mask mask, Doubles x) {
    _mm512_storeu_pd(p, _mm512_maskz_compress_pd(mask & 0xff, x.low));
    _mm512_storeu_pd(p + __builtin_popcount(mask & 0xff), _mm512_maskz_compress_pd(mask >> 8, x.high));
}

}  // namespace quartet::avx512
