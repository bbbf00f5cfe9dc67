// Vectors of 16 f32 and 32 bf16 numbers (AVX-512 with BF16), and what the kernels share on them.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#ifndef __AVX512BF16__
#error "this CPU multiplies no bfloat16 (AVX-512 BF16)"
#endif

using bf16 = uint16_t;  // the upper half of an f32

constexpr int LANES = 16;
constexpr int PANEL = 32;  // columns that a matrix product computes at once

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline __mmask16 first_lanes(int64_t count) {
    return count >= LANES ? 0xffff : (1u << count) - 1;
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

// e^x to about 1e-7, by 2^n * e^r with |r| <= ln(2) / 2 and a polynomial for e^r (Cephes, expf);
// 0 from -104 down and for NaN.
inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));  // of NaN and b, max is b
    const __m512 n = _mm512_roundscale_ps(x * 1.44269504f, _MM_FROUND_TO_NEAREST_INT);
    const __m512 r = x - n * 0.693359375f - n * -2.12194440e-4f;
    __m512 y = _mm512_set1_ps(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return _mm512_scalef_ps(y, n);
}
