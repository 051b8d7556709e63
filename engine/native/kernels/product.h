// Products of rows with a packed matrix: every output is one sum over k in ascending order.
#pragma once

#include "vectors.h"

// A packed weight.
struct Matrix {
    const char* panels;  // [out / 2 L][in][2 L elements], out padded with zeros
    const float* bias;   // [out padded], or null
    int64_t in, out;
};

namespace {

constexpr int kRowBlock = 48;  // Rows of x that stay in the L2 cache while a matrix passes.

// y[r][0 .. 2 L P) = (Add ? y : 0) + sum over k of x[r][k] * panel p's k-th inputs.
template <class E, int L, int R, int P, bool Add>
__attribute__((noinline)) void tile(const float* __restrict x, int64_t x_stride,
                                    const char* __restrict panel, int64_t panel_bytes, int64_t k_len,
                                    float* __restrict y, int64_t y_stride) {
    typedef typename Vec<L>::F V;
    V sum[R][2 * P];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < 2 * P; p++) sum[r][p] = Add ? load<V>(y + r * y_stride + p * L) : V{};
    for (int64_t k = 0; k < k_len; k++) {
        V w[2 * P];
#pragma GCC unroll 8
        for (int p = 0; p < P; p++)
            E::template widen<L>(panel + p * panel_bytes + k * 2 * L * E::kBytes, w[2 * p], w[2 * p + 1]);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            V value = x[r * x_stride + k] - V{};  // all lanes; minus zero changes nothing
#pragma GCC unroll 8
            for (int p = 0; p < 2 * P; p++) sum[r][p] += value * w[p];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < 2 * P; p++) store(y + r * y_stride + p * L, sum[r][p]);
}

template <class E, int L, int P, bool Add>
inline void tile_of(int rows, const float* x, int64_t x_stride, const char* panel,
                    int64_t panel_bytes, int64_t k_len, float* y, int64_t y_stride) {
#define PACELINE_CASE(R)                                                                      \
    case R:                                                                                   \
        return tile<E, L, R, P, Add>(x, x_stride, panel, panel_bytes, k_len, y, y_stride);
    switch (rows) {
        PACELINE_CASE(1) PACELINE_CASE(2) PACELINE_CASE(3)
        PACELINE_CASE(4) PACELINE_CASE(5) PACELINE_CASE(6)
#if defined(__AVX512F__)
        PACELINE_CASE(7) PACELINE_CASE(8) PACELINE_CASE(9)
        PACELINE_CASE(10) PACELINE_CASE(11) PACELINE_CASE(12)
#endif
    }
#undef PACELINE_CASE
}

// One or more rows against one panel, in tiles of nearly equal height.
template <class E, int L, bool Add>
inline void panel_product(int64_t rows, const float* x, int64_t x_stride, const char* panel,
                          int64_t panel_bytes, int64_t k_len, float* y, int64_t y_stride) {
    int64_t num_tiles = (rows + kMaxRows - 1) / kMaxRows;
    for (int64_t t = 0; t < num_tiles; t++) {
        int64_t first = rows * t / num_tiles, end = rows * (t + 1) / num_tiles;
        tile_of<E, L, 1, Add>(end - first, x + first * x_stride, x_stride, panel, panel_bytes, k_len,
                              y + first * y_stride, y_stride);
    }
}

inline int64_t padded_out(const Matrix& m) { return padded(m.out, 2 * kLanes); }

// y = x W^T + bias; x [rows][in], y [rows][out padded].
template <class E>
void product(const Matrix& m, int64_t rows, const float* x, int64_t x_stride, float* y,
             int64_t y_stride, int num_threads) {
    const int64_t width = 2 * kLanes, num_panels = padded_out(m) / width;
    const int64_t panel_bytes = m.in * width * E::kBytes;
    for (int64_t first = 0; first < rows; first += kRowBlock) {
        const int64_t count = rows - first < kRowBlock ? rows - first : kRowBlock;
        const float* xs = x + first * x_stride;
        float* ys = y + first * y_stride;
        // Few rows: several panels at once, to have enough sums in flight.
        const int64_t at_once = count == 1 ? 4 : count == 2 ? 2 : 1;
        const int64_t num_runs = (num_panels + at_once - 1) / at_once;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
        for (int64_t run = 0; run < num_runs; run++) {
            const int64_t p = run * at_once;
            const char* panel = m.panels + p * panel_bytes;
            float* out = ys + p * width;
            if (at_once == 4 && p + 4 <= num_panels) {
                tile<E, kLanes, 1, 4, false>(xs, x_stride, panel, panel_bytes, m.in, out, y_stride);
            } else if (at_once == 2 && p + 2 <= num_panels) {
                tile<E, kLanes, 2, 2, false>(xs, x_stride, panel, panel_bytes, m.in, out, y_stride);
            } else {
                for (int64_t q = p; q < num_panels && q < p + at_once; q++)
                    panel_product<E, kLanes, false>(count, xs, x_stride, m.panels + q * panel_bytes,
                                                    panel_bytes, m.in, ys + q * width, y_stride);
            }
        }
    }
    if (!m.bias) return;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < padded_out(m); i++) y[r * y_stride + i] += m.bias[i];
}

}  // namespace
