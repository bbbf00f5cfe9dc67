// Attention of some queries over one part of a context: at most PART tokens, whose keys and values
// lie scattered in blocks.

#pragma once

#include <algorithm>
#include <cmath>

#include "matmul.h"

constexpr int64_t PART = 128;  // tokens, a multiple of PANEL

// The running softmax of some rows: largest score, sum of weights, weighted values.
struct Softmax {
    float* most;
    float* sum;
    float* values;  // [rows, padded head_dim]

    static int64_t size(int64_t rows, int64_t width) { return rows * (width + 2); }
    static Softmax at(float* memory, int64_t rows) {
        return {memory, memory + rows, memory + 2 * rows};
    }
    void clear(int64_t rows, int64_t width) const {
        for (int64_t r = 0; r < rows; r++) most[r] = -INFINITY, sum[r] = 0;
        std::memset(values, 0, rows * width * sizeof(float));
    }
    // Fused products are spelled out: what the compiler chose could differ from place to place.
    void merge(const Softmax& part, int64_t rows, int64_t width) const {
        for (int64_t r = 0; r < rows; r++) {
            const float next = part.most[r] > most[r] ? part.most[r] : most[r];
            const __m512 mine = power_of_two_or_zero(_mm512_set1_ps(most[r] - next));
            const __m512 its = power_of_two_or_zero(_mm512_set1_ps(part.most[r] - next));
            sum[r] = std::fma(part.sum[r], its[0], sum[r] * mine[0]);
            most[r] = next;
            for (int64_t i = r * width; i < (r + 1) * width; i += LANES) {
                const __m512 old = _mm512_loadu_ps(values + i) * mine;
                _mm512_storeu_ps(values + i,
                                 _mm512_fmadd_ps(_mm512_loadu_ps(part.values + i), its, old));
            }
        }
    }
};

// Eight numbers of four keys each, from number `at` on: {i, i + 4, i + 8, i + 12} of 16 keys.
inline __m512i four_keys(const bf16* const* keys, int64_t i, int64_t at) {
    const auto load = [&](int64_t key) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys[key] + at));
    };
    __m512i four = _mm512_castsi128_si512(load(i));
    four = _mm512_mask_broadcast_i32x4(four, 0x00f0, load(i + 4));
    four = _mm512_mask_broadcast_i32x4(four, 0x0f00, load(i + 8));
    return _mm512_mask_broadcast_i32x4(four, 0xf000, load(i + 12));
}

// Pairs of numbers at, at + 2, at + 4, at + 6 of 16 keys: each pair of all keys in one vector.
inline void four_pairs(const bf16* const* keys, int64_t at, __m512i* pairs) {
    const __m512i a = four_keys(keys, 0, at), b = four_keys(keys, 1, at);
    const __m512i c = four_keys(keys, 2, at), d = four_keys(keys, 3, at);
    const __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
    const __m512i ab2 = _mm512_unpackhi_epi32(a, b), cd2 = _mm512_unpackhi_epi32(c, d);
    pairs[0] = _mm512_unpacklo_epi64(ab, cd);
    pairs[1] = _mm512_unpackhi_epi64(ab, cd);
    pairs[2] = _mm512_unpacklo_epi64(ab2, cd2);
    pairs[3] = _mm512_unpackhi_epi64(ab2, cd2);
}

// 32 numbers of two rows, side by side: the first 16 and the last 16 of both.
inline void interleave(const bf16* a, const bf16* b, __mmask32 inside, __m512i* both) {
    alignas(64) static constexpr struct Order {
        uint16_t at[64];
        constexpr Order() : at() {
            for (int i = 0; i < 64; i++) at[i] = i / 2 + i % 2 * 32;
        }
    } order;
    const __m512i x = _mm512_maskz_loadu_epi16(inside, a);
    const __m512i y = _mm512_maskz_loadu_epi16(inside, b);
    both[0] = _mm512_permutex2var_epi16(x, _mm512_load_si512(order.at), y);
    both[1] = _mm512_permutex2var_epi16(x, _mm512_load_si512(order.at + 32), y);
}

inline __mmask32 first_numbers(int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

// Where the tokens of a part lie; behind the last one, that one again, up to a whole panel.
struct TokenRows {
    const bf16* rows[PART];
    const float* scales;  // [PART] that they are to be multiplied by, or null
    int64_t count;
};

// Keys as panels of 32 (matmul.h).
inline void pack_keys(const TokenRows& keys, int64_t dim, bf16* panels) {
    for (int64_t key = 0; key < round_up(keys.count, PANEL); key += LANES) {
        bf16* panel = panels + key / PANEL * PANEL * dim + key % PANEL * 2;
        for (int64_t at = 0; at < dim; at += 8) {
            __m512i pairs[4];
            four_pairs(keys.rows + key, at, pairs);
            for (int i = 0; i < 4; i++)
                _mm512_storeu_si512(panel + (at / 2 + i) * 2 * PANEL, pairs[i]);
        }
    }
}

// Values as panels of 32 of their numbers, tokens in pairs.
inline void pack_values(const TokenRows& values, int64_t dim, bf16* panels) {
    const int64_t num_pairs = ceil_div(values.count, 2);
    for (int64_t column = 0; column < dim; column += PANEL) {
        const __mmask32 inside = first_numbers(dim - column);
        for (int64_t pair = 0; pair < num_pairs; pair++, panels += 2 * PANEL) {
            const bf16* const* rows = values.rows + 2 * pair;
            __m512i both[2];
            interleave(rows[0] + column, rows[1] + column, inside, both);
            _mm512_storeu_si512(panels, both[0]);
            _mm512_storeu_si512(panels + PANEL, both[1]);
        }
    }
}

// A few queries against keys that are not packed: the same sums in the same order.
template <int R>
inline void score(const bf16* query, int64_t dim, const TokenRows& keys, float* scores) {
    for (int64_t key = 0; key < keys.count; key += LANES) {
        __m512 sums[R];
        UNROLL for (int r = 0; r < R; r++) sums[r] = _mm512_setzero_ps();
        for (int64_t at = 0; at < dim; at += 8) {
            __m512i pairs[4];
            four_pairs(keys.rows + key, at, pairs);
            UNROLL for (int i = 0; i < 4; i++)
                UNROLL for (int r = 0; r < R; r++)
                    sums[r] = _mm512_dpbf16_ps(sums[r], pair_at(query + r * dim + at + 2 * i),
                                               (__m512bh)pairs[i]);
        }
        UNROLL for (int r = 0; r < R; r++) _mm512_storeu_ps(scores + r * PART + key, sums[r]);
    }
}

// The same for values: out [R, width], as many columns as P panels have.
template <int R, int P>
inline void add_up(const bf16* weights, const TokenRows& values, int64_t column, int64_t dim,
                   float* out, int64_t width) {
    __m512 sums[R][2 * P];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < 2 * P; v++) sums[r][v] = _mm512_setzero_ps();
    for (int64_t token = 0; token < values.count; token += 2) {
        const bf16* const* rows = values.rows + token;
        UNROLL for (int p = 0; p < P; p++) {
            const int64_t at = column + p * PANEL;
            __m512i both[2];
            interleave(rows[0] + at, rows[1] + at, first_numbers(dim - at), both);
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < 2; v++)
                    sums[r][2 * p + v] =
                        _mm512_dpbf16_ps(sums[r][2 * p + v], pair_at(weights + r * PART + token),
                                         (__m512bh)both[v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < 2 * P; v++)
            _mm512_storeu_ps(out + r * width + column + v * LANES, sums[r][v]);
}

template <int R>
inline void add_up(const bf16* weights, const TokenRows& values, int64_t dim, float* out,
                   int64_t width) {
    int64_t column = 0;
    for (; column + PANEL < dim; column += 2 * PANEL)
        add_up<R, 2>(weights, values, column, dim, out, width);
    if (column < dim) add_up<R, 1>(weights, values, column, dim, out, width);
}

inline void multiply_by(const float* scales, int64_t count, float* x) {
    for (int64_t i = 0; i < count; i += LANES)
        _mm512_storeu_ps(x + i, _mm512_loadu_ps(x + i) * _mm512_loadu_ps(scales + i));
}

// Scores of a row, of which it sees the first `seen` keys, to weights 2^(scale * score - most) for
// the values, [keys.count]; `most` is the largest exponent, `sum` that of all weights.
inline void weigh(float* scores, const TokenRows& keys, const TokenRows& values, int64_t seen,
                  float scale, float* most, float* sum, bf16* weights) {
    seen = std::min(seen, keys.count);
    if (keys.scales) multiply_by(keys.scales, seen, scores);
    __m512 largest = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < seen; i += LANES)
        largest = _mm512_mask_max_ps(largest, first_lanes(seen - i), largest,
                                     _mm512_loadu_ps(scores + i));
    *most = _mm512_reduce_max_ps(largest) * scale;
    const __m512 m = _mm512_set1_ps(*most), by = _mm512_set1_ps(scale);
    __m512 total = _mm512_setzero_ps();
    for (int64_t i = 0; i < keys.count; i += LANES) {  // behind `seen`, weights are 0
        const __mmask16 lanes = seen > i ? first_lanes(seen - i) : 0;
        const __m512 exponents = _mm512_fmsub_ps(_mm512_loadu_ps(scores + i), by, m);
        __m512 weight = _mm512_maskz_mov_ps(lanes, power_of_two(exponents));
        total = total + weight;
        if (values.scales) weight = weight * _mm512_loadu_ps(values.scales + i);
        _mm256_storeu_si256((__m256i*)(weights + i), narrow(weight));
    }
    *sum = _mm512_reduce_add_ps(total);
}
