// Sixteen lanes at a time, under the same names for each instruction set. Files named *_simd.cpp are compiled once for
// each of these, all that is in them within namespace QUARTET_ISA: what one of them needs of a CPU, no other may call.
#pragma once

#ifdef __AVX512F__
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif

namespace quartet::QUARTET_ISA {

// Of bf16 values, their number a multiple of 32: the largest without its sign, NaN where there is one.
inline uint16_t largest_magnitude(const uint16_t* p, int count) {
    const __m128i inverted = _mm_xor_si128(largest_magnitudes(p, count), _mm_set1_epi16(-1));
    return static_cast<uint16_t>(~_mm_cvtsi128_si32(_mm_minpos_epu16(inverted)));
}

// 2^x to about 2e-7; below -126 it stays at 2^-126.
inline Floats exp2_approx(Floats x) {
    x = max(x, all(-126.0f));
    const Floats whole = nearest(x);
    const Floats f = sub(x, whole);
    Floats p = all(1.5403530e-4f);
    p = fma(p, f, all(1.3333558e-3f));
    p = fma(p, f, all(9.6181291e-3f));
    p = fma(p, f, all(5.5504109e-2f));
    p = fma(p, f, all(2.4022651e-1f));
    p = fma(p, f, all(6.9314718e-1f));
    p = fma(p, f, all(1.0f));
    return times_power(p, whole);
}

// 2^x to about 1e-4, less than bf16 rounds away. 0 of -infinity, NaN of NaN.
inline Floats exp2_weight(Floats x) {
    const Floats f = split_power(x);
    Floats p = all(0.07802452f);
    p = fma(p, f, all(0.22606716f));
    p = fma(p, f, all(0.69583354f));
    p = fma(p, f, all(0.99992520f));
    return times_power(p, x);
}

// x / (1 + exp(-x))
inline Floats silu(Floats x) {
    // Past the clamp the quotient is 0 anyway; it keeps the sum finite.
    const Floats power = min(mul(x, all(-1.44269504f)), all(125.0f));
    const Floats sum = add(exp2_approx(power), all(1.0f));
    Floats inverse = about_reciprocal(sum);
    inverse = mul(inverse, fnma(sum, inverse, all(2.0f)));
    return mul(x, inverse);
}

}  // namespace quartet::QUARTET_ISA
