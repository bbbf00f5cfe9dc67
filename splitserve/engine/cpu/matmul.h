// bf16 matrix products with f32 sums: x [rows, k] times w [n, k] transposed.
//
// w is laid out once ("packed") in panels of 32 of its rows, which are columns of the result, with
// pairs of k side by side, as the multiplication instruction takes them:
//
//     panel p:  k 0,1 of rows 32p .. 32p+31 | k 2,3 of them | ...      rows and k padded with 0
//
// A product is the sum over k in order, whatever the number of rows and threads: a row's result
// does not depend on what is computed beside it.

#pragma once

#include "simd.h"
#include "team.h"

constexpr int MOST_ROWS = 14;       // of a tile: 28 sums, two panels of weights, one of x
constexpr int64_t BLOCK_ROWS = 112;  // of x that stay in the second-level cache

struct Matrix {
    const bf16* panels;
    const float* bias;  // [panels * 32] or null
    int64_t num_panels;
    int64_t num_pairs;  // of k
};

inline void pack(const bf16* w, int64_t n, int64_t k, bf16* panels) {
    const int64_t num_pairs = ceil_div(k, 2);
    std::memset(panels, 0, round_up(n, PANEL) * num_pairs * 2 * sizeof(bf16));
    for (int64_t row = 0; row < n; row++) {
        bf16* to = panels + row / PANEL * num_pairs * 2 * PANEL + row % PANEL * 2;
        for (int64_t i = 0; i < k; i++) to[i / 2 * 2 * PANEL + i % 2] = w[row * k + i];
    }
}

// out [R, 32] = x [R, 2 * num_pairs] times one panel.
template <int R>
inline void multiply_tile(const bf16* x, int64_t stride, const bf16* panel, int64_t num_pairs,
                          float* out, int64_t out_stride) {
    __m512 left[R], right[R];
    for (int r = 0; r < R; r++) left[r] = right[r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < num_pairs; k++) {
        const __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel + k * 2 * PANEL);
        const __m512bh w1 = (__m512bh)_mm512_loadu_si512(panel + k * 2 * PANEL + PANEL);
        for (int r = 0; r < R; r++) {
            const __m512bh pair = pair_at(x + r * stride + 2 * k);
            left[r] = _mm512_dpbf16_ps(left[r], pair, w0);
            right[r] = _mm512_dpbf16_ps(right[r], pair, w1);
        }
    }
    for (int r = 0; r < R; r++) {
        _mm512_storeu_ps(out + r * out_stride, left[r]);
        _mm512_storeu_ps(out + r * out_stride + LANES, right[r]);
    }
}

inline void multiply_tile(int64_t rows, const bf16* x, int64_t stride, const bf16* panel,
                          int64_t num_pairs, float* out, int64_t out_stride) {
#define CASE(R) \
    case R: return multiply_tile<R>(x, stride, panel, num_pairs, out, out_stride)
    switch (rows) {
        CASE(1); CASE(2); CASE(3); CASE(4); CASE(5); CASE(6); CASE(7);
        CASE(8); CASE(9); CASE(10); CASE(11); CASE(12); CASE(13); CASE(14);
    }
#undef CASE
}

// Calls `tile(first, rows)` for about equal pieces of at most MOST_ROWS.
template <typename Tile>
inline void for_tiles(int64_t rows, const Tile& tile) {
    const int64_t num_tiles = ceil_div(rows, MOST_ROWS);
    for (int64_t i = 0; i < num_tiles; i++) {
        const int64_t first = rows * i / num_tiles;
        tile(first, rows * (i + 1) / num_tiles - first);
    }
}

// x [rows, k] times a whole matrix, shared by the team. `done(row, rows, panel, sums)` gets each
// tile, sums [rows, 32].
template <typename Done>
inline void multiply(Team& team, const bf16* x, int64_t stride, int64_t rows, const Matrix& w,
                     const Done& done) {
    const int64_t num_blocks = ceil_div(rows, BLOCK_ROWS);
    team.share(num_blocks * w.num_panels, [&](int64_t task) {
        const int64_t block = task / w.num_panels, panel = task % w.num_panels;
        const int64_t start = rows * block / num_blocks;
        const int64_t end = rows * (block + 1) / num_blocks;
        alignas(64) float sums[MOST_ROWS * PANEL];
        for_tiles(end - start, [&](int64_t first, int64_t count) {
            const int64_t row = start + first;
            multiply_tile(count, x + row * stride, stride,
                          w.panels + panel * w.num_pairs * 2 * PANEL, w.num_pairs, sums, PANEL);
            done(row, count, panel, sums);
        });
    });
}
