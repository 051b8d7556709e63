// Vectors, and how panels of a matrix and of the KV pool store their elements.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

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

// --- elements: how a panel of 2 L outputs stores its inputs, and how they are multiplied ---------
//
// A panel is stretch after stretch, each the next kInputs inputs of all its outputs.

// Two floats are multiplied, one of each side.
struct FloatProducts {
    static constexpr int kInputs = 1;
    template <int L>
    using Weights = typename Vec<L>::F;
    // x[k] in all lanes.
    template <int L>
    static inline typename Vec<L>::F spread(const float* x, int64_t k) {
        return x[k] - typename Vec<L>::F{};  // minus zero changes nothing
    }
    template <class V>
    static inline V multiply_add(V value, V w, V sum) { return sum + value * w; }
};

// bfloat16: L words, the lower half of word i is output i, the upper half output i + L. Two
// operations widen all of them, and nothing is shuffled.
struct Bf16 : FloatProducts {
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

struct F32 : FloatProducts {
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

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define PACELINE_INT8
// Whole numbers: two bytes for each output, its even input first. Rows are rounded to 16 bits before
// (round_rows), and a sum is exact. What its lanes hold are integers, though their type is float.
struct Int8 {
    static constexpr int kBytes = 1, kInputs = 2;
#if defined(__AVX512BW__)
    template <int L>
    using Weights = __m512i;
    static inline __m512i words(const char* p) { return _mm512_cvtepi8_epi16(load<__m256i>(p)); }
    template <int L>
    static inline __m512i spread(const float* x, int64_t k) {
        return _mm512_set1_epi32(load<int32_t>(x + k));
    }
    static inline Vec<16>::F multiply_add(__m512i value, __m512i w, Vec<16>::F sum) {
#if defined(__AVX512VNNI__)
        return (Vec<16>::F)_mm512_dpwssd_epi32((__m512i)sum, w, value);
#else
        return (Vec<16>::F)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16(w, value));
#endif
    }
#else
    template <int L>
    using Weights = __m256i;
    static inline __m256i words(const char* p) { return _mm256_cvtepi8_epi16(load<__m128i>(p)); }
    template <int L>
    static inline __m256i spread(const float* x, int64_t k) {
        return _mm256_set1_epi32(load<int32_t>(x + k));
    }
    static inline Vec<8>::F multiply_add(__m256i value, __m256i w, Vec<8>::F sum) {
        return (Vec<8>::F)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(w, value));
    }
#endif
    template <int L>
    static inline void widen(const char* p, Weights<L>& a, Weights<L>& b) {
        a = words(p);
        b = words(p + 2 * L);
    }
    template <int L>
    static inline char* place(char* p, int i) { return p + 2 * i; }
};
#endif

#if defined(__AVX512BF16__)
// bfloat16 for CPUs that multiply pairs of it themselves, twice as many at once as floats: a word for
// each output, its even input in the lower half. Rows are rounded to bfloat16 before (round_rows),
// and a sum takes its inputs in ascending order pair by pair.
struct Bf16Pairs {
    static constexpr int kBytes = 2, kInputs = 2;
    template <int L>
    using Weights = __m512bh;
    template <int L>
    static inline void widen(const char* p, __m512bh& a, __m512bh& b) {
        a = load<__m512bh>(p);
        b = load<__m512bh>(p + 64);
    }
    template <int L>
    static inline __m512bh spread(const float* x, int64_t k) {
        return (__m512bh)_mm512_set1_epi32(load<int32_t>(x + k));
    }
    static inline Vec<16>::F multiply_add(__m512bh value, __m512bh w, Vec<16>::F sum) {
        return _mm512_dpbf16_ps(sum, w, value);
    }
    template <int L>
    static inline char* place(char* p, int i) { return p + 4 * i; }
};
#endif

// How weights of an element type lie in panels.
template <class E>
struct WeightsOf {
    typedef E type;
};
#if defined(__AVX512BF16__)
template <>
struct WeightsOf<Bf16> {
    typedef Bf16Pairs type;
};
#endif

}  // namespace
