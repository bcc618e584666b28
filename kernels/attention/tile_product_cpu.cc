#include "kernels/attention/tile_product_cpu.h"

#include "kernels/vector_math.h"

namespace muster::cpu {

namespace {

// kRows x (16 · kVecs) of c in registers.
template <int kRows, int kVecs>
MUSTER_INLINE void block(float* c, int64_t ldc, const float* a, int64_t a_row, int64_t a_column,
                         const float* b, int64_t ldb, int64_t k, bool accumulate) {
  Vec sum[kRows][kVecs];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVecs; ++j) sum[i][j] = accumulate ? load(c + i * ldc + j * kLanes) : Vec{};
  }
  for (int64_t p = 0; p < k; ++p) {
    Vec right[kVecs];
    for (int j = 0; j < kVecs; ++j) right[j] = load(b + p * ldb + j * kLanes);
    for (int i = 0; i < kRows; ++i) {
      const float left = a[i * a_row + p * a_column];
      for (int j = 0; j < kVecs; ++j) sum[i][j] += left * right[j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVecs; ++j) store(c + i * ldc + j * kLanes, sum[i][j]);
  }
}

// A panel of 16 · kVecs columns: blocks of kRows rows, then of half as many, and so on.
template <int kRows, int kVecs>
MUSTER_INLINE void panel(float* c, int64_t ldc, const float* a, int64_t a_row, int64_t a_column,
                         const float* b, int64_t ldb, int64_t m, int64_t k, bool accumulate) {
  int64_t i = 0;
  for (; i + kRows <= m; i += kRows) {
    block<kRows, kVecs>(c + i * ldc, ldc, a + i * a_row, a_row, a_column, b, ldb, k, accumulate);
  }
  if constexpr (kRows > 1) {
    if (i < m) {
      panel<kRows / 2, kVecs>(c + i * ldc, ldc, a + i * a_row, a_row, a_column, b, ldb, m - i, k,
                              accumulate);
    }
  }
}

// AVX-512 has 32 registers of a whole Vec: up to 24 sums, the row of b and a broadcast.
__attribute__((target("avx512f"))) void product_avx512(float* c, int64_t ldc, const float* a,
                                                       int64_t a_row, int64_t a_column,
                                                       const float* b, int64_t ldb, int64_t m,
                                                       int64_t n, int64_t k, bool accumulate) {
  for (; n >= 4 * kLanes; n -= 4 * kLanes, b += 4 * kLanes, c += 4 * kLanes) {
    panel<6, 4>(c, ldc, a, a_row, a_column, b, ldb, m, k, accumulate);
  }
  if (n == 3 * kLanes) panel<8, 3>(c, ldc, a, a_row, a_column, b, ldb, m, k, accumulate);
  if (n == 2 * kLanes) panel<8, 2>(c, ldc, a, a_row, a_column, b, ldb, m, k, accumulate);
  if (n == kLanes) panel<8, 1>(c, ldc, a, a_row, a_column, b, ldb, m, k, accumulate);
}

}  // namespace

void tile_product(float* c, int64_t ldc, const float* a, int64_t a_row, int64_t a_column,
                  const float* b, int64_t ldb, int64_t m, int64_t n, int64_t k, bool accumulate) {
  if (__builtin_cpu_supports("avx512f")) {
    return product_avx512(c, ldc, a, a_row, a_column, b, ldb, m, n, k, accumulate);
  }
  // AVX2 has sixteen registers of half a Vec: twelve for sums.
  for (; n > 0; n -= kLanes, b += kLanes, c += kLanes) {
    panel<6, 1>(c, ldc, a, a_row, a_column, b, ldb, m, k, accumulate);
  }
}

}  // namespace muster::cpu
