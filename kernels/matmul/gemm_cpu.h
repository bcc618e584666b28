// The float32 product under matmul, attention and cross_entropy on the CPU: oneDNN's sgemm, cut so
// that results do not depend on the number of threads.
#pragma once

#include <cstdint>

namespace muster::cpu {

// c[m, n] = op(a) · op(b) + beta · c, all row-major with row strides lda, ldb, ldc. beta is 0 (c is
// not read) or 1. Any size may be 0.
struct Gemm {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  const float* a = nullptr;
  int64_t lda = 0;
  bool transpose_a = false;
  const float* b = nullptr;
  int64_t ldb = 0;
  bool transpose_b = false;
  float* c = nullptr;
  int64_t ldc = 0;
  float beta = 0.0f;
};

// Rows of c that one gemm_rows call computes. A function of m alone, because oneDNN's order of
// summation may depend on the size it is called with.
int64_t gemm_block_rows(int64_t m);

// Rows [begin, end) of c. Call it inside an OpenMP parallel region (outside, oneDNN spreads the sum
// over threads of its own); bitwise reproducible for equal (begin, end).
void gemm_rows(const Gemm& gemm, int64_t begin, int64_t end);

// All of c, over this thread's OpenMP team.
void gemm_parallel(const Gemm& gemm);

}  // namespace muster::cpu
