// Sums over a row and over blocks of rows, for the normalisations.
#pragma once

#include "kernels/blocks.h"
#include "kernels/vector_math.h"

namespace muster::cpu {

// The elements at p as one scalar or one vector.
template <typename F>
MUSTER_INLINE F load_as(const float* p);
template <>
MUSTER_INLINE float load_as<float>(const float* p) {
  return *p;
}
template <>
MUSTER_INLINE Vec load_as<Vec>(const float* p) {
  return load(p);
}

// Σ term<F>(i) over [0, n), where term<Vec>(i) gives the terms of i … i + kLanes − 1. Two vectors
// of partial sums hide the adds' latency; the order of the sum depends on n alone.
template <typename Term>
MUSTER_INLINE float row_sum(int64_t n, Term term) {
  Vec even = {};
  Vec odd = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    even += term.template operator()<Vec>(i);
    odd += term.template operator()<Vec>(i + kLanes);
  }
  if (i + kLanes <= n) {
    even += term.template operator()<Vec>(i);
    i += kLanes;
  }
  float sum = reduce_add(even + odd);
  for (; i < n; ++i) sum += term.template operator()<float>(i);
  return sum;
}

// sum[j] += Σ_b partials[b, j] for partials [blocks, n], in order of b.
inline void add_partials(float* sum, const float* partials, int64_t blocks, int64_t n) {
  constexpr int64_t kColumns = 256;
  const int64_t groups = (n + kColumns - 1) / kColumns;
#pragma omp parallel for schedule(static) if (blocks * n >= kParallelElements)
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t end = std::min(n, (group + 1) * kColumns);
    for (int64_t b = 0; b < blocks; ++b) {
#pragma omp simd
      for (int64_t j = group * kColumns; j < end; ++j) sum[j] += partials[b * n + j];
    }
  }
}

}  // namespace muster::cpu
