// The small product inside a tile of attention, with both operands in cache. A library call costs
// more than it saves at these sizes (64 x 64 x 32: 70 GFLOP/s by dnnl_sgemm, 106 here, of 117).
#pragma once

#include <cstdint>

namespace muster::cpu {

// c[m, n] = a · b, or += when `accumulate`. Element (i, p) of a is a[i · a_row + p · a_column], so
// a may be transposed; b [k, n] and c have rows of ldb and ldc floats. n is a multiple of 16. Each
// element is one chain of fused multiply-adds in order of p, whatever the instruction set.
void tile_product(float* c, int64_t ldc, const float* a, int64_t a_row, int64_t a_column,
                  const float* b, int64_t ldb, int64_t m, int64_t n, int64_t k, bool accumulate);

}  // namespace muster::cpu
