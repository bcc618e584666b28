// exp and its kin without branches or library calls, as scalars for loops that the compiler
// vectorises and on sixteen lanes for hand-written ones.
#pragma once

#include <bit>
#include <cstdint>

// Compiles a function twice, for AVX-512 and for the folder's baseline (AVX2), and picks at load
// time. What it calls is only covered where it is inlined (MUSTER_INLINE); an OpenMP region inside
// it is not, so parallel loops call such functions, never the other way round.
// Not under the thread sanitizer: what picks would call it before it is ready.
#ifdef __SANITIZE_THREAD__
#define MUSTER_SIMD_CLONES
#else
#define MUSTER_SIMD_CLONES __attribute__((target_clones("arch=x86-64-v4", "default")))
#endif
#define MUSTER_INLINE inline __attribute__((always_inline))

namespace muster::cpu {

// Sixteen lanes: one AVX-512 register or two of AVX2; the compiler splits. The Unaligned type is
// for loads and stores through pointers. Compare and choose with the functions below, not with
// operators: GCC 12 takes a comparison of two Vecs apart lane by lane when the function is compiled
// for a narrower target than it is later inlined into.
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
// Lanes of x where the mask is set (all bits), of y where it is not.
MUSTER_INLINE Vec choose(IntVec mask, Vec x, Vec y) {
  return std::bit_cast<Vec>((std::bit_cast<IntVec>(x) & mask) | (std::bit_cast<IntVec>(y) & ~mask));
}
// x in the first `count` lanes (all or none of them if count lies outside 0 … 16), else y.
MUSTER_INLINE Vec choose_first(int64_t count, Vec x, Vec y) {
  return choose((kLaneIndex - static_cast<int32_t>(count)) >> 31, x, y);
}
// The sign of the difference decides; where one is NaN, either may come back.
MUSTER_INLINE Vec max(Vec a, Vec b) {
  return choose(std::bit_cast<IntVec>(a - b) >> 31, b, a);
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

// e^r − 1 for |r| ≤ ln2 / 2: r + r² p(r), where p interpolates at the interval's Chebyshev nodes
// and is 0.1 ulp (of e^r) off.
template <typename F>
MUSTER_INLINE F expm1_of_fraction(F r) {
  F p = r * 1.3926213466e-3f + 8.3632029716e-3f;
  p = p * r + 4.1666554438e-2f;
  p = p * r + 1.6666576846e-1f;
  p = p * r + 0.5f;
  return p * r * r + r;
}
template <typename F>
MUSTER_INLINE F exp_of_fraction(F r) {
  return expm1_of_fraction(r) + 1.0f;
}

// e^x = 2^n e^r with x = n ln2 + r: ln2 in two parts, the first with few bits, so that n times it
// is exact. Adding kRoundToInt rounds to an integer, which then lies in the low bits of the sum.
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2High = 0.693359375f;
constexpr float kLn2Low = -2.12194440054690583e-4f;
constexpr float kRoundToInt = 12582912.0f;

// e^x to 1.5 units in the last place over the whole range, denormal results included; +inf above
// 88.73, 0 below −103.97 and at −inf, NaN stays NaN.
MUSTER_INLINE float fast_exp(float x) {
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float shifted = x * kLog2E + kRoundToInt;
  const float n = shifted - kRoundToInt;
  const float p = exp_of_fraction((x - n * kLn2High) - n * kLn2Low);
  // 2^n in two factors, each in the normal range, so that n from −150 to 128 works.
  const int32_t whole = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRoundToInt);
  const int32_t half = whole >> 1;
  const float scale_a = std::bit_cast<float>((half + 127) << 23);
  const float scale_b = std::bit_cast<float>((whole - half + 127) << 23);
  return p * scale_a * scale_b;
}

// 1 / (1 + e^−x). tanh-GELU needs no tanh: x/2 · (1 + tanh u) = x · sigmoid(2u).
MUSTER_INLINE float fast_sigmoid(float x) {
  return 1.0f / (1.0f + fast_exp(-x));
}

// e^max(x, −60) for finite x ≤ 88: all that a softmax needs, at half of fast_exp's work. (Beside
// the row's largest term, 1, e^−60 is nothing; and unlike what lies below it can be multiplied
// without becoming denormal.) NaN and −inf give NaN.
MUSTER_INLINE Vec softmax_exp(Vec x) {
  const Vec y = max(x, broadcast(-60.0f));
  // 127 in the rounding constant makes n the exponent field of 2^n.
  constexpr float kRound = kRoundToInt + 127.0f;
  const Vec shifted = y * kLog2E + kRound;
  const Vec n = shifted - kRound;
  const Vec p = exp_of_fraction((y - n * kLn2High) - n * kLn2Low);
  const Vec scale = std::bit_cast<Vec>(std::bit_cast<IntVec>(shifted) << 23);
  return p * scale + x * 0.0f;
}

// tanh to 4 units in the last place, also of small results: −t / (t + 2) with t = e^−2|x| − 1,
// which is put together from e^r − 1 and 2^n − 1. NaN and infinities give NaN.
MUSTER_INLINE Vec fast_tanh(Vec x) {
  const IntVec sign = std::bit_cast<IntVec>(x) & std::bit_cast<IntVec>(broadcast(-0.0f));
  const Vec size = std::bit_cast<Vec>(std::bit_cast<IntVec>(x) ^ sign);
  // Beyond 10 it is 1.
  const Vec y = max(size * -2.0f, broadcast(-20.0f));
  constexpr float kRound = kRoundToInt + 127.0f;
  const Vec shifted = y * kLog2E + kRound;
  const Vec n = shifted - kRound;
  const Vec scale = std::bit_cast<Vec>(std::bit_cast<IntVec>(shifted) << 23);
  const Vec t = expm1_of_fraction((y - n * kLn2High) - n * kLn2Low) * scale + (scale - 1.0f);
  const Vec result = t / (t + 2.0f);  // of −|x|
  return std::bit_cast<Vec>(std::bit_cast<IntVec>(result) ^ sign ^
                            std::bit_cast<IntVec>(broadcast(-0.0f))) +
         x * 0.0f;
}

}  // namespace muster::cpu
