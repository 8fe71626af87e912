// simd.h for AVX2 with FMA and F16C: each vector is two or four of the CPU's. What adds up lanes does so in the order
// of the other instruction set's, so that both give the same numbers.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>

#define QUARTET_ISA avx2

namespace quartet::avx2 {

constexpr bool kHasTiles = false;
constexpr int kRegisters = 8;  // that hold Floats, two each

struct Floats {
    __m256 low, high;
};
struct Ints {
    __m256i low, high;
};
// All bits of a lane, or none.
struct Mask {
    __m256 low, high;
};

inline __m256i as_ints(__m256 x) { return _mm256_castps_si256(x); }
inline __m256 as_floats(__m256i x) { return _mm256_castsi256_ps(x); }

inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x.low), _mm256_storeu_ps(p + 8, x.high); }
inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats fms(Floats a, Floats b, Floats c) {
    return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
inline Floats fnma(Floats a, Floats b, Floats c) {
    return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
// sum += a * b. By hand: GCC 12 takes the forms that end in a factor's register, and then runs out of these.
inline void accumulate(__m256& sum, __m256 a, __m256 b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
}

// Where either is NaN these give the second.
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Floats abs(Floats x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline Floats nearest(Floats x) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.low, kMode), _mm256_round_ps(x.high, kMode)};
}
// 2^whole, whole in [-126, 127]; 0 of -127.
inline __m256 power_of_two(__m256 whole) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return as_floats(_mm256_slli_epi32(biased, 23));
}
inline Floats times_power(Floats x, Floats whole) {
    return {_mm256_mul_ps(x.low, power_of_two(whole.low)), _mm256_mul_ps(x.high, power_of_two(whole.high))};
}
// To some 12 bits.
inline Floats about_reciprocal(Floats x) { return {_mm256_rcp_ps(x.low), _mm256_rcp_ps(x.high)}; }
inline float first(Floats x) { return _mm256_cvtss_f32(x.low); }
inline float sum(Floats x) {
    const __m256 eight = _mm256_add_ps(x.high, x.low);
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_movehdup_ps(two));
}
inline float largest(Floats x) {
    const __m256 eight = _mm256_max_ps(x.high, x.low);
    const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// --- masks ----------------------------------------------------------------------------------------

inline Mask first_lanes(int count) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return {as_floats(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes)),
            as_floats(_mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8), lanes))};
}
template <int Relation>
inline Mask compare(Floats a, Floats b) {
    return {_mm256_cmp_ps(a.low, b.low, Relation), _mm256_cmp_ps(a.high, b.high, Relation)};
}
inline Mask less(Floats a, Floats b) { return compare<_CMP_LT_OQ>(a, b); }
inline Mask less_equal(Floats a, Floats b) { return compare<_CMP_LE_OQ>(a, b); }
inline Mask equal(Floats a, Floats b) { return compare<_CMP_EQ_OQ>(a, b); }
inline Mask unordered(Floats a, Floats b) { return compare<_CMP_UNORD_Q>(a, b); }
inline Mask both(Mask a, Mask b) { return {_mm256_and_ps(a.low, b.low), _mm256_and_ps(a.high, b.high)}; }
inline Mask either(Mask a, Mask b) { return {_mm256_or_ps(a.low, b.low), _mm256_or_ps(a.high, b.high)}; }
inline Mask inverse(Mask a) {
    const __m256 ones = as_floats(_mm256_set1_epi32(-1));
    return {_mm256_xor_ps(a.low, ones), _mm256_xor_ps(a.high, ones)};
}
inline Mask less_equal(Ints a, Ints b) {
    return inverse({as_floats(_mm256_cmpgt_epi32(a.low, b.low)), as_floats(_mm256_cmpgt_epi32(a.high, b.high))});
}
inline unsigned bits(Mask mask) { return _mm256_movemask_ps(mask.low) | (unsigned)_mm256_movemask_ps(mask.high) << 8; }

// The first `count` lanes, the others 0.
inline Floats load_some(const float* p, int count) {
    if (count >= 16) return load(p);
    const Mask mask = first_lanes(count);
    return {_mm256_maskload_ps(p, as_ints(mask.low)), _mm256_maskload_ps(p + 8, as_ints(mask.high))};
}
inline Floats load_or(const float* p, int count, Floats rest) {
    if (count >= 16) return load(p);
    const Mask mask = first_lanes(count);
    const Floats x = load_some(p, count);
    return {_mm256_blendv_ps(rest.low, x.low, mask.low), _mm256_blendv_ps(rest.high, x.high, mask.high)};
}
inline void store_where(float* p, Mask mask, Floats x) {
    _mm256_maskstore_ps(p, as_ints(mask.low), x.low);
    _mm256_maskstore_ps(p + 8, as_ints(mask.high), x.high);
}
inline void store_some(float* p, Floats x, int count) {
    count >= 16 ? store(p, x) : store_where(p, first_lanes(count), x);
}

// --- 16 and 8 bits --------------------------------------------------------------------------------

inline __m256 widened(__m128i bf16) { return as_floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16)); }
// Of bf16 values without their signs, their number a multiple of 16: eight among which the largest is.
inline __m128i largest_magnitudes(const uint16_t* p, int count) {
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    __m256i most = _mm256_setzero_si256();
    for (int i = 0; i < count; i += 16)
        most = _mm256_max_epu16(most, _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(p + i)), magnitude));
    return _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
}
inline Floats load_bf16(const uint16_t* p) {
    return {widened(_mm_loadu_si128((const __m128i*)p)), widened(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
// The nearest, of two that are as near the even one; NaN stays so. In the upper half of each lane.
inline __m256i rounded_to_bf16(__m256 x) {
    const __m256i exact = as_ints(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(exact, 16), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_add_epi32(exact, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(exact, _mm256_set1_epi32(0x400000));
    return as_ints(_mm256_blendv_ps(as_floats(nearest), as_floats(quiet), _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline __m256i to_bf16(Floats x) {
    const __m256i low = _mm256_srli_epi32(rounded_to_bf16(x.low), 16);
    const __m256i high = _mm256_srli_epi32(rounded_to_bf16(x.high), 16);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
}
inline void store_bf16(uint16_t* p, Floats x) { _mm256_storeu_si256((__m256i*)p, to_bf16(x)); }
inline void store_bf16_some(uint16_t* p, Floats x, int count) {
    if (count >= 16) return store_bf16(p, x);
    alignas(32) uint16_t values[16];
    store_bf16(values, x);
    for (int i = 0; i < count; ++i) p[i] = values[i];
}
// The 16 values to every second place of 32, the even ones or the odd; what is between them is not written.
inline void store_every_second(uint16_t* p, const uint16_t* values, bool odd) {
    for (int i = 0; i < 16; ++i) p[2 * i + odd] = values[i];
}
inline Floats load_fp16(const uint16_t* p) {
    const __m128i low = _mm_loadu_si128((const __m128i*)p), high = _mm_loadu_si128((const __m128i*)(p + 8));
    return {_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)};
}

inline Ints all_ints(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints load_ints(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline void store_ints(void* p, Ints x) {
    _mm256_storeu_si256((__m256i*)p, x.low);
    _mm256_storeu_si256((__m256i*)p + 1, x.high);
}
inline Ints lane_numbers() {
    return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
inline Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline Ints bits_and(Ints a, Ints b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
inline int sum(Ints x) {
    const __m256i eight = _mm256_add_epi32(x.low, x.high);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline Ints nearest_ints(Floats x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
inline void store_int8(int8_t* p, Ints x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i*)p, bytes);
}

// --- attention: products of pairs of bf16 ---------------------------------------------------------

// What the cache's lines are multiplied with is kept as this, pairs beside each other.
using Operand = float;
// A line of 16 pairs is multiplied in so many steps: the even halves, then the odd ones.
constexpr int kParts = 2;
using Line = Floats;
using Pair = __m256;

inline void store_operands(Operand* p, Floats x) { store(p, x); }
inline void copy_operands(Operand* p, const uint16_t* values, int count) {
    for (int i = 0; i < count; i += 16) store(p + i, load_bf16(values + i));
}
inline Line load_line(const uint16_t* p, int part) {
    const Ints pairs = load_ints(p);
    if (part == 0) return {as_floats(_mm256_slli_epi32(pairs.low, 16)), as_floats(_mm256_slli_epi32(pairs.high, 16))};
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return {as_floats(_mm256_and_si256(pairs.low, upper)), as_floats(_mm256_and_si256(pairs.high, upper))};
}
inline Pair load_pair(const Operand* p, int part) { return _mm256_broadcast_ss(p + part); }
inline Floats dot(Floats sum, Line line, Pair pair) {
    accumulate(sum.low, line.low, pair);
    accumulate(sum.high, line.high, pair);
    return sum;
}

// What is left of x above its floor; x becomes the floor, as times_power wants it.
inline Floats split_power(Floats& x) {
    // With the bound as the first operand NaN comes out; of -127 the power is 0.
    const Floats bounded = max(all(-127.0f), x);
    x = {_mm256_floor_ps(bounded.low), _mm256_floor_ps(bounded.high)};
    return sub(bounded, x);
}

// --- sampling -------------------------------------------------------------------------------------

struct Doubles {  // 16 too
    __m256d part[4];
};

// body(part) for each of the four.
template <class Body>
inline Doubles each_part(const Body& body) {
    return {{body(0), body(1), body(2), body(3)}};
}

inline Doubles all_doubles(double x) {
    return each_part([=](int) { return _mm256_set1_pd(x); });
}
inline Doubles load_doubles(const double* p) {
    return each_part([=](int i) { return _mm256_loadu_pd(p + 4 * i); });
}
inline void store(double* p, Doubles x) {
    for (int i = 0; i < 4; ++i) _mm256_storeu_pd(p + 4 * i, x.part[i]);
}
inline Doubles to_doubles(Floats x) {
    return {{_mm256_cvtps_pd(_mm256_castps256_ps128(x.low)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.low, 1)),
             _mm256_cvtps_pd(_mm256_castps256_ps128(x.high)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.high, 1))}};
}
inline Doubles add(Doubles a, Doubles b) {
    return each_part([&](int i) { return _mm256_add_pd(a.part[i], b.part[i]); });
}
inline Doubles mul(Doubles a, Doubles b) {
    return each_part([&](int i) { return _mm256_mul_pd(a.part[i], b.part[i]); });
}
inline Doubles fma(Doubles a, Doubles b, Doubles c) {
    return each_part([&](int i) { return _mm256_fmadd_pd(a.part[i], b.part[i], c.part[i]); });
}
inline Doubles fms(Doubles a, Doubles b, Doubles c) {
    return each_part([&](int i) { return _mm256_fmsub_pd(a.part[i], b.part[i], c.part[i]); });
}
inline Doubles nearest(Doubles x) {
    return each_part([&](int i) { return _mm256_round_pd(x.part[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); });
}
// x * 2^whole, whole in [-1022, 1023].
inline Doubles times_power(Doubles x, Doubles whole) {
    return each_part([&](int i) {
        const __m256i wide = _mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(whole.part[i]));
        const __m256i biased = _mm256_add_epi64(wide, _mm256_set1_epi64x(1023));
        return _mm256_mul_pd(x.part[i], _mm256_castsi256_pd(_mm256_slli_epi64(biased, 52)));
    });
}
// 0 in the other lanes.
inline Doubles where(Mask mask, Doubles x) {
    return each_part([&](int i) {
        const __m256i lanes = as_ints(i < 2 ? mask.low : mask.high);
        const __m128i four = i % 2 ? _mm256_extracti128_si256(lanes, 1) : _mm256_castsi256_si128(lanes);
        return _mm256_and_pd(_mm256_castsi256_pd(_mm256_cvtepi32_epi64(four)), x.part[i]);
    });
}
inline double sum(Doubles x) {
    const __m256d low = _mm256_add_pd(x.part[0], x.part[2]), high = _mm256_add_pd(x.part[1], x.part[3]);
    const __m256d four = _mm256_add_pd(high, low);
    const __m128d two = _mm_add_pd(_mm256_extractf128_pd(four, 1), _mm256_castpd256_pd128(four));
    return _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
}

// By the bits of a mask of 8, which lanes are beside each other then.
constexpr std::array<uint64_t, 256> packing_orders() {
    std::array<uint64_t, 256> orders{};
    for (unsigned mask = 0; mask < 256; ++mask) {
        int place = 0;
        for (uint64_t lane = 0; lane < 8; ++lane)
            if (mask >> lane & 1) orders[mask] |= lane << 8 * place++;
    }
    return orders;
}
inline constexpr std::array<uint64_t, 256> kPackingOrders = packing_orders();

inline __m256i packed(__m256i x, unsigned mask) {
    const __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(kPackingOrders[mask])));
    return _mm256_permutevar8x32_epi32(x, order);
}
// The mask's lanes beside each other; up to 16 are written.
inline void store_packed(int32_t* p, Mask mask, Ints x) {
    const unsigned low = _mm256_movemask_ps(mask.low), high = _mm256_movemask_ps(mask.high);
    _mm256_storeu_si256((__m256i*)p, packed(x.low, low));
    _mm256_storeu_si256((__m256i*)(p + __builtin_popcount(low)), packed(x.high, high));
}
inline void store_packed(float* p, Mask mask, Floats x) {
    store_packed(reinterpret_cast<int32_t*>(p), mask, Ints{as_ints(x.low), as_ints(x.high)});
}
inline void store_packed(double* p, Mask mask, Doubles x) {
    const unsigned lanes = bits(mask);
    for (int i = 0; i < 4; ++i) {
        const unsigned four = lanes >> 4 * i & 15, spread = (four | four << 2) & 0x33;
        const unsigned pairs = (spread | spread << 1) & 0x55;
        _mm256_storeu_pd(p, _mm256_castsi256_pd(packed(_mm256_castpd_si256(x.part[i]), pairs | pairs << 1)));
        p += __builtin_popcount(four);
    }
}

}  // namespace quartet::avx2
