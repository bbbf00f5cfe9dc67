// Vectors of 16 f32 and 32 bf16 numbers (AVX-512 with BF16), and what the kernels share on them.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#ifndef __AVX512BF16__
#error "this CPU multiplies no bfloat16 (AVX-512 BF16)"
#endif

using bf16 = uint16_t;  // the upper half of an f32

// Sums stay in registers only where the loops over them are gone.
#define UNROLL _Pragma("GCC unroll 16")

constexpr float LOG2_E = 1.442695041f;
constexpr int LANES = 16;
constexpr int PANEL = 32;  // columns that a matrix product computes at once

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline __mmask16 first_lanes(int64_t count) {
    return count >= LANES ? 0xffff : (1u << count) - 1;
}

inline __m512bh load_bf16(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }

inline __m512bh load_bf16(const int8_t* from) {  // exact: 7 bits and a sign
    const auto widen = [&](int at) {
        const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
    };
    return _mm512_cvtne2ps_pbh(widen(LANES), widen(0));
}

// Two neighbouring numbers in all 16 places.
inline __m512bh pair_at(const bf16* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

inline __m512 widen(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }  // to nearest even

// n numbers, to the nearest bf16.
inline void narrow(const float* from, bf16* to, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        const __mmask16 lanes = first_lanes(n - i);
        _mm256_mask_storeu_epi16(to + i, lanes, narrow(_mm512_maskz_loadu_ps(lanes, from + i)));
    }
}

// n numbers in bf16, exactly, and the scale behind them.
inline float widen(const int8_t* from, int64_t n, bf16* to) {
    for (int64_t i = 0; i < n; i += LANES) {
        const __mmask16 lanes = first_lanes(n - i);
        const __m512i whole = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, from + i));
        _mm256_mask_storeu_epi16(to + i, lanes, narrow(_mm512_cvtepi32_ps(whole)));
    }
    float scale;
    std::memcpy(&scale, from + n, sizeof scale);
    return scale;
}

// 2^x for finite x, to about 3e-06: 2^n * 2^r with |r| <= 1/2 and a polynomial for 2^r, fitted at
// Chebyshev's nodes; 0 from -150 down.
inline __m512 power_of_two(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT);
    const __m512 r = x - n;
    __m512 y = _mm512_set1_ps(9.582852866e-03f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.590642492e-02f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.402409862e-01f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.931241934e-01f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

// The same for any x but plus infinity; 0 for minus infinity and NaN.
inline __m512 power_of_two_or_zero(__m512 x) {
    return power_of_two(_mm512_max_ps(x, _mm512_set1_ps(-150.0f)));  // of NaN and b, max is b
}
