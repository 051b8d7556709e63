// Vectors, and how panels of a matrix and of the KV pool store their elements.
#pragma once

#include <stdint.h>
#include <string.h>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kMaxRows = 12;
#else
constexpr int kLanes = 8, kMaxRows = 6;
#endif
constexpr int kAttentionLanes = 8;  // So that a group of slots is 16 on every machine.
constexpr int kGroup = 2 * kAttentionLanes;

template <int L>
struct Vec {
    typedef float F __attribute__((vector_size(4 * L)));
    typedef uint32_t U __attribute__((vector_size(4 * L)));
    typedef int32_t I __attribute__((vector_size(4 * L)));
};

template <typename V>
inline V load(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

template <typename V>
inline void store(void* p, V v) {
    memcpy(p, &v, sizeof v);
}

inline int64_t padded(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// --- elements: how a panel of 2 L outputs stores its k-th inputs -------------------------------

// bfloat16: L words, the lower half of word i is output i, the upper half output i + L. Two
// operations widen all of them, and nothing is shuffled.
struct Bf16 {
    static constexpr int kBytes = 2;
    template <int L>
    static inline void widen(const char* p, typename Vec<L>::F& a, typename Vec<L>::F& b) {
        auto words = load<typename Vec<L>::U>(p);
        a = (typename Vec<L>::F)(words << 16);
        b = (typename Vec<L>::F)(words & 0xffff0000u);
    }
    // Element i of a stretch of 2 L.
    template <int L>
    static inline char* place(char* p, int i) { return p + 4 * (i % L) + 2 * (i / L); }
    static inline void put(char* p, float value) {
        uint32_t bits;
        memcpy(&bits, &value, 4);
        bits += 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even; value is finite
        if ((bits & 0x7f800000u) == 0x7f800000u) bits -= 0x10000;  // not to infinity
        uint16_t upper = bits >> 16;
        memcpy(p, &upper, 2);
    }
    static inline float get(const char* p) {
        uint16_t upper;
        memcpy(&upper, p, 2);
        uint32_t bits = (uint32_t)upper << 16;
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
};

struct F32 {
    static constexpr int kBytes = 4;
    template <int L>
    static inline void widen(const char* p, typename Vec<L>::F& a, typename Vec<L>::F& b) {
        a = load<typename Vec<L>::F>(p);
        b = load<typename Vec<L>::F>(p + 4 * L);
    }
    template <int L>
    static inline char* place(char* p, int i) { return p + 4 * i; }
    static inline void put(char* p, float value) { memcpy(p, &value, 4); }
    static inline float get(const char* p) {
        float value;
        memcpy(&value, p, 4);
        return value;
    }
};

}  // namespace
