// Included by files compiled for AVX-512 only.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace quartet {

// Four bytes in every lane.
inline __m512i broadcast4(const void* p) {
    int32_t value;
    std::memcpy(&value, p, sizeof value);
    return _mm512_set1_epi32(value);
}

inline __m512 load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

inline __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

inline void store_bf16(uint16_t* p, __m512 x) { _mm256_storeu_si256((__m256i*)p, to_bf16(x)); }

inline __m512 load_fp16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

inline __m512 dot_bf16(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

inline __mmask16 first_lanes(int count) {
    return count >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << (count < 0 ? 0 : count)) - 1);
}

// 2^x to about 2e-7; below -126 it stays at 2^-126.
inline __m512 exp2_approx(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-126.0f));
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.5403530e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3333558e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

// x / (1 + exp(-x))
inline __m512 silu(__m512 x) {
    // Past the clamp the quotient is 0 anyway; it keeps the sum finite.
    const __m512 power = _mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)), _mm512_set1_ps(125.0f));
    const __m512 sum = _mm512_add_ps(exp2_approx(power), _mm512_set1_ps(1.0f));
    __m512 inverse = _mm512_rcp14_ps(sum);
    inverse = _mm512_mul_ps(inverse, _mm512_fnmadd_ps(sum, inverse, _mm512_set1_ps(2.0f)));
    return _mm512_mul_ps(x, inverse);
}

}  // namespace quartet
