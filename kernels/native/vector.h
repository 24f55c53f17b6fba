// One vector of floats for the instruction set this file is compiled for, and the few operations on it.
//
// Everything else in this folder is written once over `Vector`; only its width differs between machines.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // floats
constexpr int kMaxTileRows = 12;  // rows of a tile: 2 accumulators each leave registers for the operands
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kWidth = 8;
constexpr int kMaxTileRows = 6;
#else
#error "needs AVX-512F, or AVX2 with FMA"
#endif

typedef float Vector __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Bits __attribute__((vector_size(4 * kWidth)));
typedef int32_t Integers __attribute__((vector_size(4 * kWidth)));

inline Vector load(const float* from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline void store(float* to, Vector v) { std::memcpy(to, &v, sizeof v); }

inline Vector broadcast(float x) { return x - Vector{}; }

// Written out, never left to the compiler's contraction: every caller must round in the same places.
inline Vector multiply_add(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

inline Vector choose(Integers is_first, Vector first, Vector second) {
    return (Vector)(((Integers)first & is_first) | ((Integers)second & ~is_first));
}

inline Vector larger(Vector a, Vector b) { return choose(a > b, a, b); }

template <int kDistance, int... kLane>
inline Vector rotated(Vector v, std::integer_sequence<int, kLane...>) {
    return __builtin_shufflevector(v, v, ((kLane + kDistance) % kWidth)...);
}

// One lane out of all: pairs that are kDistance apart are joined, then pairs of those.
template <int kDistance = kWidth / 2, class Join>
inline float fold(Vector v, Join join) {
    v = join(v, rotated<kDistance>(v, std::make_integer_sequence<int, kWidth>()));
    if constexpr (kDistance > 1)
        return fold<kDistance / 2>(v, join);
    else
        return v[0];
}

// The order of the sum depends on nothing but the width.
inline float sum(Vector v) {
    return fold(v, [](Vector a, Vector b) { return a + b; });
}

inline float largest_of(Vector v) { return fold(v, larger); }

// A float's upper half.
typedef uint16_t Bfloat16;
typedef Bfloat16 HalfVector __attribute__((vector_size(2 * kWidth)));

inline Vector load(const Bfloat16* from) {
    HalfVector v;
    std::memcpy(&v, from, sizeof v);
    return (Vector)(__builtin_convertvector(v, Bits) << 16);
}

// Rounded to the nearest, ties to even; NaN stays NaN.
inline void narrow(const float* from, int64_t length, Bfloat16* to) {
    for (int64_t i = 0; i < length; i++) {
        uint32_t bits;
        std::memcpy(&bits, from + i, sizeof bits);
        const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        to[i] = Bfloat16((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

inline void narrow(const float* from, int64_t length, float* to) { std::memcpy(to, from, length * sizeof(float)); }

// Calls body(i, count) for the vectors of a row: count is kWidth, known to the compiler, but for the last.
template <class Body>
inline void for_vectors(int64_t length, Body body) {
    int64_t i = 0;
    for (; i + kWidth <= length; i += kWidth) body(i, std::integral_constant<int64_t, kWidth>());
    if (i < length) body(i, length - i);
}

// The first `count` lanes from memory, zeros in the others; and back.
inline Vector load(const float* from, int64_t count) {
    Vector v = {};
    std::memcpy(&v, from, count * sizeof(float));
    return v;
}

inline void store(float* to, Vector v, int64_t count) { std::memcpy(to, &v, count * sizeof(float)); }

// exp(x) within 2 units in the last place; exactly 1 at 0, exactly 0 below -87, NaN for NaN. Not for x above 88.
// x = n ln 2 + r with |r| <= ln 2 / 2; the polynomial is the Taylor series of exp(r) to the seventh power.
inline Vector exponential(Vector x) {
    const Integers is_tiny = x < broadcast(-87.0f), is_nan = x != x;
    x = choose(is_tiny, broadcast(-87.0f), x);
    const Vector magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vector shifted = multiply_add(x, broadcast(1.44269504f), magic);
    const Vector n = shifted - magic;
    Vector r = multiply_add(n, broadcast(-0.693145752f), x);
    r = multiply_add(n, broadcast(-1.42860677e-6f), r);
    Vector p = broadcast(1.0f / 5040);
    for (float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        p = multiply_add(p, r, broadcast(factor));
    const Integers exponent = ((Integers)shifted - (Integers)magic) << 23;
    return choose(is_nan, x, choose(is_tiny, Vector{}, (Vector)((Integers)p + exponent)));
}
