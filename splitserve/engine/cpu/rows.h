// What a decoder does to single rows: norms, rotation, the gate.

#pragma once

#include <cmath>

#include "simd.h"

// x / rms(x) * weight, n numbers; all padded to whole vectors, x with zeros. In place or not.
inline float inverse_rms(const float* x, int64_t n, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += LANES) {
        const __m512 v = _mm512_maskz_loadu_ps(first_lanes(n - i), x + i);
        squares = v * v + squares;
    }
    return 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / n + eps);
}

inline void norm(const float* x, const float* weight, int64_t n, float eps, bf16* out) {
    const __m512 scale = _mm512_set1_ps(inverse_rms(x, n, eps));
    for (int64_t i = 0; i < n; i += LANES) {
        const __mmask16 lanes = first_lanes(n - i);
        const __m512 v = _mm512_maskz_loadu_ps(lanes, x + i) * scale;
        const __m512 w = _mm512_maskz_loadu_ps(lanes, weight + i);
        _mm256_mask_storeu_epi16(out + i, lanes, narrow(v * w));
    }
}

inline void norm(float* x, const float* weight, int64_t n, float eps) {
    const float scale = inverse_rms(x, n, eps);
    for (int64_t i = 0; i < n; i++) x[i] = x[i] * scale * weight[i];
}

// Turn a head [n] by the angles of its position: cosine and (for the first half negative) sine [n].
inline void rotate(const float* head, const float* cosine, const float* sine, int64_t n,
                   bf16* out) {
    const int64_t half = n / 2;
    float turned[1024];
    for (int64_t i = 0; i < half; i++) {
        turned[i] = head[i] * cosine[i] + head[half + i] * sine[i];
        turned[half + i] = head[half + i] * cosine[half + i] + head[i] * sine[half + i];
    }
    narrow(turned, out, n);
}

inline __m512 silu(__m512 x) { return x / (1.0f + exponential(-x)); }
