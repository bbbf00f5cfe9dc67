// Matrix products with f32 sums: x [rows, k] in bf16 times w [n, k], in bf16 or int8, transposed.
//
// w is laid out once ("packed") in panels of 32 of its rows, which are columns of the result, with
// pairs of k side by side, as the multiplication instruction takes them:
//
//     panel p:  k 0,1 of rows 32p .. 32p+31 | k 2,3 of them | ...      rows and k padded with 0
//
// A product is the sum over k in order, whatever the number of rows and threads: a row's result
// does not depend on what is computed beside it. An int8 weight is widened to bf16, exactly, on its
// way into the product; its row's scale multiplies the sum.

#pragma once

#include "simd.h"
#include "team.h"

constexpr int MOST_ROWS = 14;       // of a tile: 28 sums, two panels of weights, one of x
constexpr int64_t BLOCK_ROWS = 112;  // of x that stay in the second-level cache

struct Matrix {
    const void* panels;   // of bf16, or with scales of int8
    const float* scales;  // [panels * 32] or null
    const float* bias;    // [panels * 32] or null
    int64_t num_panels;
    int64_t num_pairs;  // of k
};

template <typename Weight>
inline void pack(const Weight* w, int64_t n, int64_t k, Weight* panels) {
    const int64_t num_pairs = ceil_div(k, 2);
    std::memset(panels, 0, round_up(n, PANEL) * num_pairs * 2 * sizeof(Weight));
    for (int64_t row = 0; row < n; row++) {
        Weight* to = panels + row / PANEL * num_pairs * 2 * PANEL + row % PANEL * 2;
        for (int64_t i = 0; i < k; i++) to[i / 2 * 2 * PANEL + i % 2] = w[row * k + i];
    }
}

// out [R, 32] = x [R, 2 * num_pairs] times one panel.
template <int R, typename Weight>
inline void multiply_tile(const bf16* x, int64_t stride, const Weight* panel, int64_t num_pairs,
                          float* out, int64_t out_stride) {
    __m512 left[R], right[R];
    UNROLL for (int r = 0; r < R; r++) left[r] = right[r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < num_pairs; k++) {
        const __m512bh w0 = load_bf16(panel + k * 2 * PANEL);
        const __m512bh w1 = load_bf16(panel + k * 2 * PANEL + PANEL);
        UNROLL for (int r = 0; r < R; r++) {
            const __m512bh pair = pair_at(x + r * stride + 2 * k);
            left[r] = _mm512_dpbf16_ps(left[r], pair, w0);
            right[r] = _mm512_dpbf16_ps(right[r], pair, w1);
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        _mm512_storeu_ps(out + r * out_stride, left[r]);
        _mm512_storeu_ps(out + r * out_stride + LANES, right[r]);
    }
}

template <typename Weight>
inline void multiply_tile(int64_t rows, const bf16* x, int64_t stride, const Weight* panel,
                          int64_t num_pairs, float* out, int64_t out_stride) {
#define CASE(R) \
    case R: return multiply_tile<R, Weight>(x, stride, panel, num_pairs, out, out_stride)
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

// sums [rows, 32] of a panel, times the scales of its columns, plus their bias.
inline void finish_tile(const Matrix& w, int64_t panel, int64_t rows, float* sums) {
    if (!w.scales && !w.bias) return;
    for (int64_t lane = 0; lane < PANEL; lane += LANES) {
        const int64_t column = panel * PANEL + lane;
        const __m512 scale = w.scales ? _mm512_loadu_ps(w.scales + column) : _mm512_set1_ps(1);
        const __m512 bias = w.bias ? _mm512_loadu_ps(w.bias + column) : _mm512_setzero_ps();
        for (int64_t i = lane; i < rows * PANEL; i += PANEL)
            _mm512_storeu_ps(sums + i, _mm512_loadu_ps(sums + i) * scale + bias);
    }
}

template <typename Weight, typename Done>
inline void multiply_as(Team& team, const bf16* x, int64_t stride, int64_t rows, const Matrix& w,
                        const Done& done) {
    const int64_t num_blocks = ceil_div(rows, BLOCK_ROWS);
    const Weight* panels = static_cast<const Weight*>(w.panels);
    team.share(num_blocks * w.num_panels, [&](int64_t task) {
        const int64_t block = task / w.num_panels, panel = task % w.num_panels;
        const int64_t start = rows * block / num_blocks;
        const int64_t end = rows * (block + 1) / num_blocks;
        alignas(64) float sums[MOST_ROWS * PANEL];
        for_tiles(end - start, [&](int64_t first, int64_t count) {
            const int64_t row = start + first;
            multiply_tile(count, x + row * stride, stride, panels + panel * w.num_pairs * 2 * PANEL,
                          w.num_pairs, sums, PANEL);
            finish_tile(w, panel, count, sums);
            done(row, count, panel, sums);
        });
    });
}

// x [rows, k] times a whole matrix, shared by the team. `done(row, rows, panel, result)` gets each
// tile, result [rows, 32].
template <typename Done>
inline void multiply(Team& team, const bf16* x, int64_t stride, int64_t rows, const Matrix& w,
                     const Done& done) {
    if (w.scales)
        multiply_as<int8_t>(team, x, stride, rows, w, done);
    else
        multiply_as<bf16>(team, x, stride, rows, w, done);
}
