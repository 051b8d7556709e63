// What is done to single rows. Strides and lengths are multiples of the lanes, padding is zero.
#pragma once

#include <math.h>

#include "vectors.h"

namespace {

typedef Vec<kLanes>::F V;

// e to the power of x, to about one unit in the last place (Cephes' polynomial).
template <int L>
inline typename Vec<L>::F exponential(typename Vec<L>::F x) {
    typedef typename Vec<L>::F F;
    typedef typename Vec<L>::I I;
    const F low = F{} - 87.0f, high = F{} + 88.0f;
    x = x < low ? low : x;
    x = x > high ? high : x;
    const F magic = F{} + 12582912.0f;  // adding it rounds to an integer
    const F n = (x * 1.44269504f + magic) - magic;
    const F r = x - n * 0.693359375f - n * -2.12194440e-4f;
    F p = F{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (F)((__builtin_convertvector(n, I) + 127) << 23);
}

template <int L>
inline float total(typename Vec<L>::F v) {
    float lanes[L];
    store(lanes, v);
    for (int step = L / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
    return lanes[0];
}

template <int L>
inline float largest(typename Vec<L>::F v) {
    float lanes[L];
    store(lanes, v);
    for (int i = 1; i < L; i++) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
    return lanes[0];
}

// y may be x.
void rms_norm(const float* x, const float* weight, int64_t len, float eps, float* y) {
    V squares = {};
    for (int64_t i = 0; i < padded(len, kLanes); i += kLanes) {
        V v = load<V>(x + i);
        squares += v * v;
    }
    const float scale = 1.0f / sqrtf(total<kLanes>(squares) / (float)len + eps);
    for (int64_t i = 0; i < padded(len, kLanes); i += kLanes)
        store(y + i, load<V>(x + i) * scale * load<V>(weight + i));
}

// The same over a head of any length, whose neighbours in memory are other heads.
void rms_norm_head(float* x, const float* weight, int64_t len, float eps) {
    float squares = 0;
    for (int64_t i = 0; i < len; i++) squares += x[i] * x[i];
    const float scale = 1.0f / sqrtf(squares / (float)len + eps);
    for (int64_t i = 0; i < len; i++) x[i] = x[i] * scale * weight[i];
}

void rotate_head(float* x, const float* cosine, const float* sine, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

void add(float* x, const float* y, int64_t len) {
    for (int64_t i = 0; i < len; i += kLanes) store(x + i, load<V>(x + i) + load<V>(y + i));
}

// y[i] = activation(gate[i]) * up[i]
void gated_activation(const float* gate, const float* up, int64_t len, bool gelu, float* y) {
    for (int64_t i = 0; i < len; i += kLanes) {
        // The last stretch is filled up, so that every element takes the same operations.
        float g_lanes[kLanes] = {}, u_lanes[kLanes] = {};
        const int64_t count = len - i < kLanes ? len - i : kLanes;
        memcpy(g_lanes, gate + i, count * sizeof(float));
        memcpy(u_lanes, up + i, count * sizeof(float));
        const V g = load<V>(g_lanes), u = load<V>(u_lanes);
        // Both are g times a logistic function: SiLU of g, GELU (by tanh) of a polynomial of g.
        const V z = gelu ? -1.5957691216f * (g + 0.044715f * g * g * g) : -g;
        store(g_lanes, g / (1.0f + exponential<kLanes>(z)) * u);
        memcpy(y + i, g_lanes, count * sizeof(float));
    }
}

}  // namespace
