// exp and its kin without branches or library calls: the same inline code serves a scalar, in
// loops that the compiler vectorises, and GCC's vector types, in hand-written ones.
#pragma once

#include <bit>
#include <cstdint>

// Compiles a function twice, for AVX-512 and for the folder's baseline (AVX2), and picks at load
// time. What it calls is only covered where it is inlined (MUSTER_INLINE); an OpenMP region inside
// it is not, so parallel loops call such functions, never the other way round.
#define MUSTER_SIMD_CLONES __attribute__((target_clones("arch=x86-64-v4", "default")))
#define MUSTER_INLINE inline __attribute__((always_inline))

namespace muster::cpu {

// Sixteen lanes: one AVX-512 register or two of AVX2; the compiler splits. The Unaligned type is
// for loads and stores through pointers.
constexpr int kLanes = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef float UnalignedVec __attribute__((vector_size(64), aligned(4), may_alias));

constexpr IntVec kLaneIndex = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

MUSTER_INLINE Vec load(const float* p) {
  return *reinterpret_cast<const UnalignedVec*>(p);
}
MUSTER_INLINE void store(float* p, Vec x) {
  *reinterpret_cast<UnalignedVec*>(p) = x;
}
MUSTER_INLINE Vec broadcast(float x) {
  return x - Vec{};
}
MUSTER_INLINE Vec max(Vec a, Vec b) {
  return a > b ? a : b;
}

// Lane sums and maxima in a fixed tree order.
template <typename Fold>
MUSTER_INLINE float reduce(Vec x, Fold fold) {
  typedef float Half __attribute__((vector_size(32)));
  typedef float Quarter __attribute__((vector_size(16)));
  const Half h = fold(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7),
                      __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
  const Quarter q =
      fold(__builtin_shufflevector(h, h, 0, 1, 2, 3), __builtin_shufflevector(h, h, 4, 5, 6, 7));
  return fold(fold(q[0], q[2]), fold(q[1], q[3]));
}
MUSTER_INLINE float reduce_add(Vec x) {
  return reduce(
      x, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}
MUSTER_INLINE float reduce_max(Vec x) {
  return reduce(
      x, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
}

// e^r for |r| ≤ ln2 / 2: 1 + r + r² p(r), where p interpolates at the interval's Chebyshev nodes
// and is 0.1 ulp off.
template <typename F>
MUSTER_INLINE F exp_of_fraction(F r) {
  F p = r * 1.3926213466e-3f + 8.3632029716e-3f;
  p = p * r + 4.1666554438e-2f;
  p = p * r + 1.6666576846e-1f;
  p = p * r + 0.5f;
  return p * r * r + r + 1.0f;
}

// e^x to 1.5 units in the last place over the whole range, denormal results included; +inf above
// 88.73, 0 below −103.97 and at −inf, NaN stays NaN. F is float with I int32_t, or Vec with IntVec.
template <typename F, typename I>
MUSTER_INLINE F exp_of(F x) {
  // x = n ln2 + r, |r| ≤ ln2 / 2. Adding 1.5·2^23 rounds to an integer in the low mantissa bits.
  const F low = F{} - 104.0f;
  const F high = F{} + 89.0f;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const F shifted = x * 1.44269504088896341f + 12582912.0f;
  const F n = shifted - 12582912.0f;
  const F r = (x - n * 0.693359375f) - n * -2.12194440054690583e-4f;
  const F p = exp_of_fraction(r);
  // 2^n in two factors, each in the normal range, so that n from −150 to 128 works.
  const I whole = std::bit_cast<I>(shifted) - 0x4b400000;
  const I half = whole >> 1;
  const F scale_a = std::bit_cast<F>((half + 127) << 23);
  const F scale_b = std::bit_cast<F>((whole - half + 127) << 23);
  return p * scale_a * scale_b;
}
MUSTER_INLINE float fast_exp(float x) {
  return exp_of<float, int32_t>(x);
}
MUSTER_INLINE Vec fast_exp(Vec x) {
  return exp_of<Vec, IntVec>(x);
}

// e^x for x ≤ 88 and 0 below −87 (NaN stays NaN): all that a softmax needs, at two thirds of
// fast_exp's work. 127 in the rounding constant turns n into an exponent field.
MUSTER_INLINE Vec softmax_exp(Vec x) {
  constexpr float kRound = 12582912.0f + 127.0f;
  const Vec shifted = x * 1.44269504088896341f + kRound;
  const Vec n = shifted - kRound;
  const Vec r = (x - n * 0.693359375f) - n * -2.12194440054690583e-4f;
  const Vec scale = std::bit_cast<Vec>(std::bit_cast<IntVec>(shifted) << 23);
  return x < -87.0f ? Vec{} : exp_of_fraction(r) * scale;
}

// 1 / (1 + e^−x). tanh-GELU needs no tanh: x/2 · (1 + tanh u) = x · sigmoid(2u).
MUSTER_INLINE float fast_sigmoid(float x) {
  return 1.0f / (1.0f + fast_exp(-x));
}
MUSTER_INLINE Vec fast_sigmoid(Vec x) {
  return 1.0f / (1.0f + fast_exp(-x));
}

}  // namespace muster::cpu
