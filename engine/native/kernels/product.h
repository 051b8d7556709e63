// Products of rows with a packed matrix: every output is one sum over k in ascending order, or over
// pairs of k (Bf16Pairs, Int8).
#pragma once

#include <float.h>
#include <math.h>

#include "vectors.h"

// A packed weight.
struct Matrix {
    const char* panels;  // [out / 2 L][in / kInputs][2 L kInputs elements], padded with zeros
    const float* scale;  // [out padded], of Int8: what a weight of one stands for
    const float* bias;   // [out padded], or null
    int64_t in, out;
};

namespace {

constexpr int kRowBlock = 48;  // Rows of x that stay in the L2 cache while a matrix passes.

// Bytes of weights that are fetched ahead of the products with few rows: left to the CPU, 2 rows took
// 1.1 times as long and 4 rows 1.4 times (AVX2).
constexpr int64_t kUnderWay = 3072;

// Where a tile has memory fetched while it multiplies.
struct Ahead {
    const char* from;
    int64_t bytes;  // for each stretch of the tile's panel
};

// y[r][0 .. 2 L P) = (Add ? y : 0) + sum over k < k_len of x[r][k] * panel p's k-th stretch.
template <class E, int L, int R, int P, bool Add, bool Fetch>
__attribute__((noinline)) void tile(const float* __restrict x, int64_t x_stride,
                                    const char* __restrict panel, int64_t panel_bytes, int64_t k_len,
                                    float* __restrict y, int64_t y_stride, Ahead ahead) {
    typedef typename Vec<L>::F V;
    constexpr int64_t kStretchBytes = 2 * L * E::kInputs * E::kBytes;
    V sum[R][2 * P];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < 2 * P; p++) sum[r][p] = Add ? load<V>(y + r * y_stride + p * L) : V{};
#pragma GCC unroll 4
    for (int64_t k = 0; k < k_len; k++) {
        typename E::template Weights<L> w[2 * P];
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            const int64_t offset = p * panel_bytes;
#pragma GCC unroll 4
            for (int64_t line = 0; Fetch && line < kStretchBytes; line += 64)
                __builtin_prefetch(ahead.from + offset + k * ahead.bytes + line);
            E::template widen<L>(panel + offset + k * kStretchBytes, w[2 * p], w[2 * p + 1]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const auto value = E::template spread<L>(x + r * x_stride, k);
#pragma GCC unroll 8
            for (int p = 0; p < 2 * P; p++) sum[r][p] = E::multiply_add(value, w[p], sum[r][p]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < 2 * P; p++) store(y + r * y_stride + p * L, sum[r][p]);
}

template <class E, int L, bool Add, bool Fetch>
inline void tile_of(int rows, const float* x, int64_t x_stride, const char* panel, int64_t k_len,
                    float* y, int64_t y_stride, Ahead ahead) {
#define PACELINE_CASE(R)                                                                      \
    case R:                                                                                   \
        return tile<E, L, R, 1, Add, Fetch>(x, x_stride, panel, 0, k_len, y, y_stride, ahead);
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

// One or more rows against one panel, in tiles of nearly equal height. Where there are several tiles
// they share the fetching of the next panel, so that all of them multiply while it comes.
template <class E, int L, bool Add, bool Fetch>
inline void panel_product(int64_t rows, const float* x, int64_t x_stride, const char* panel,
                          int64_t k_len, float* y, int64_t y_stride) {
    constexpr int64_t kStretchBytes = 2 * L * E::kInputs * E::kBytes;
    const int64_t num_tiles = (rows + kMaxRows - 1) / kMaxRows, bytes = k_len * kStretchBytes;
    for (int64_t t = 0; t < num_tiles; t++) {
        const int64_t first = rows * t / num_tiles, end = rows * (t + 1) / num_tiles;
        const Ahead ahead = {panel + (num_tiles == 1 ? kUnderWay : bytes + bytes * t / num_tiles),
                             kStretchBytes / num_tiles};
        tile_of<E, L, Add, Fetch>(end - first, x + first * x_stride, x_stride, panel, k_len,
                                  y + first * y_stride, y_stride, ahead);
    }
}

inline int64_t padded_out(const Matrix& m) { return padded(m.out, 2 * kLanes); }

// Bytes of a panel of a weight with so many inputs.
template <class E>
int64_t panel_bytes_of(int64_t in) {
    typedef typename WeightsOf<E>::type W;
    return padded(in, W::kInputs) * 2 * kLanes * W::kBytes;
}

// The k-th input of a panel's output o.
template <class E>
inline char* place_in_panel(char* panel, int64_t k, int64_t o) {
    typedef typename WeightsOf<E>::type W;
    char* stretch = panel + k / W::kInputs * 2 * kLanes * W::kInputs * W::kBytes;
    return W::template place<kLanes>(stretch, o) + k % W::kInputs * W::kBytes;
}

// For elements that are multiplied as floats, rows stay as they are.
template <class W>
void round_rows(float*, int64_t, int64_t, int64_t) {}

#if defined(__AVX512BF16__)
// Rounds rows to bfloat16 where they lie, so that each begins with its pairs, the last one filled up.
template <>
void round_rows<Bf16Pairs>(float* x, int64_t rows, int64_t in, int64_t x_stride) {
    for (int64_t r = 0; r < rows; r++) {
        float* row = x + r * x_stride;
        for (int64_t k = 0; k < in; k += 32) {
            float values[32] = {};
            const int64_t count = in - k < 32 ? in - k : 32;
            memcpy(values, row + k, count * sizeof(float));
            const __m512bh rounded =
                _mm512_cvtne2ps_pbh(load<__m512>(values + 16), load<__m512>(values));
            memcpy((char*)row + 2 * k, &rounded, 2 * padded(count, 2));
        }
    }
}
#endif

#if defined(PACELINE_INT8)
// Largest whole number of a row of which products with so many weights cannot overflow a sum.
inline int32_t largest_word(int64_t in) {
    const int64_t most = INT32_MAX / (128 * padded(in, 2));
    return most < INT16_MAX ? most : INT16_MAX;
}

// Where a row that was rounded to whole numbers keeps what one of them stands for: behind them.
inline int64_t place_of_scale(int64_t in) { return in - 1; }

// Rounds rows to 16 bits where they lie, so that each begins with its pairs, the last one filled up. A
// row that is not finite becomes one of NaN.
template <>
void round_rows<Int8>(float* x, int64_t rows, int64_t in, int64_t x_stride) {
    const float most = largest_word(in);
    for (int64_t r = 0; r < rows; r++) {
        float* row = x + r * x_stride;
        uint32_t largest_bits = 0;
        for (int64_t k = 0; k < in; k++) {
            const uint32_t bits = load<uint32_t>(row + k) & 0x7fffffffu;
            largest_bits = bits > largest_bits ? bits : largest_bits;
        }
        const float largest = load<float>(&largest_bits);
        const float factor = largest > 0 && largest <= FLT_MAX ? most / largest : 0;
        const float scale = largest <= FLT_MAX ? largest / most : NAN;
        for (int64_t k = 0; k < in; k += 32) {
            float values[32] = {};
            int16_t rounded[32];
            const int64_t count = in - k < 32 ? in - k : 32;
            memcpy(values, row + k, count * sizeof(float));
            // Adding this rounds to an integer, which is then the lower bits.
            for (int i = 0; i < 32; i++) values[i] = values[i] * factor + 12582912.0f;
            for (int i = 0; i < 32; i++) rounded[i] = (int16_t)load<int32_t>(values + i);
            memcpy((char*)row + 2 * k, rounded, 2 * padded(count, 2));
        }
        row[place_of_scale(in)] = scale;
    }
}

// Sums of whole numbers as what they stand for.
inline void scale_sums(const Matrix& m, const float* x, float* y) {
    const float row_scale = x[place_of_scale(m.in)];
    for (int64_t i = 0; i < padded_out(m); i++)
        y[i] = (float)load<int32_t>(y + i) * (m.scale[i] * row_scale);
}
#endif

// y = x W^T * scale + bias; x [rows][in], y [rows][out padded]. What was in x is lost.
template <class E>
void product(const Matrix& m, int64_t rows, float* x, int64_t x_stride, float* y, int64_t y_stride,
             int num_threads) {
    typedef typename WeightsOf<E>::type W;
    const int64_t width = 2 * kLanes, num_panels = padded_out(m) / width;
    const int64_t panel_bytes = panel_bytes_of<E>(m.in);
    const int64_t num_stretches = padded(m.in, W::kInputs) / W::kInputs;
    round_rows<W>(x, rows, m.in, x_stride);
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
            const Ahead ahead = {panel + kUnderWay / at_once, panel_bytes / num_stretches};
            if (at_once == 4 && p + 4 <= num_panels) {
                tile<W, kLanes, 1, 4, false, true>(xs, x_stride, panel, panel_bytes, num_stretches,
                                                   out, y_stride, ahead);
            } else if (at_once == 2 && p + 2 <= num_panels) {
                tile<W, kLanes, 2, 2, false, true>(xs, x_stride, panel, panel_bytes, num_stretches,
                                                   out, y_stride, ahead);
            } else {
                for (int64_t q = p; q < num_panels && q < p + at_once; q++)
                    panel_product<W, kLanes, false, true>(count, xs, x_stride,
                                                          m.panels + q * panel_bytes, num_stretches,
                                                          ys + q * width, y_stride);
            }
        }
    }
#if defined(PACELINE_INT8)
    for (int64_t r = 0; m.scale && r < rows; r++)
        scale_sums(m, x + r * x_stride, y + r * y_stride);
#endif
    for (int64_t r = 0; m.bias && r < rows; r++)
        for (int64_t i = 0; i < padded_out(m); i++) y[r * y_stride + i] += m.bias[i];
}

}  // namespace
