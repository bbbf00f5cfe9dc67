// What a decoder does to single rows: norms, rotation, the gate.

#pragma once

#include <cmath>

#include "simd.h"

inline float inverse_rms(const float* x, int64_t n, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += LANES) {
        const __m512 v = _mm512_maskz_loadu_ps(first_lanes(n - i), x + i);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    return 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / n + eps);
}

// x / rms(x) * weight, n numbers and, for products that take pairs, a zero behind an odd n.
inline void norm(const float* x, const float* weight, int64_t n, float eps, bf16* out) {
    const __m512 scale = _mm512_set1_ps(inverse_rms(x, n, eps));
    for (int64_t i = 0; i < n; i += LANES) {
        const __mmask16 lanes = first_lanes(n - i);
        const __m512 v = _mm512_maskz_loadu_ps(lanes, x + i) * scale;
        const __m512 w = _mm512_maskz_loadu_ps(lanes, weight + i);
        _mm256_mask_storeu_epi16(out + i, first_lanes(round_up(n, 2) - i), narrow(v * w));
    }
}

inline void norm(float* x, const float* weight, int64_t n, float eps) {
    const float scale = inverse_rms(x, n, eps);
    for (int64_t i = 0; i < n; i++) x[i] = x[i] * scale * weight[i];
}

// Turn a head [n] by the angles of its position: cosine and (for the first half negative) sine [n].
inline void rotate(float* head, const float* cosine, const float* sine, int64_t n) {
    const int64_t half = n / 2;
    for (int64_t i = 0; i < half; i++) {
        const float left = head[i], right = head[half + i];
        head[i] = left * cosine[i] + right * sine[i];
        head[half + i] = right * cosine[half + i] + left * sine[half + i];
    }
}

// n numbers in int8, the largest as 127, and behind them the f32 that they are to be multiplied by.
inline void quantize(const float* x, int64_t n, int8_t* to) {
    __m512 most = _mm512_setzero_ps();
    __mmask16 none = 0;  // no number: a maximum would forget it
    for (int64_t i = 0; i < n; i += LANES) {
        const __m512 v = _mm512_maskz_loadu_ps(first_lanes(n - i), x + i);
        none |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        most = _mm512_max_ps(most, _mm512_abs_ps(v));
    }
    const float largest = none ? NAN : _mm512_reduce_max_ps(most), scale = largest / 127;
    const __m512 inverse = _mm512_set1_ps(largest > 0 ? 127 / largest : 0);
    for (int64_t i = 0; i < n; i += LANES) {
        const __mmask16 lanes = first_lanes(n - i);
        const __m512i whole = _mm512_cvtps_epi32(_mm512_maskz_loadu_ps(lanes, x + i) * inverse);
        _mm512_mask_cvtsepi32_storeu_epi8(to + i, lanes, whole);
    }
    std::memcpy(to + n, &scale, sizeof scale);
}

inline __m512 silu(__m512 x) { return x / (1.0f + power_of_two_or_zero(x * -LOG2_E)); }
