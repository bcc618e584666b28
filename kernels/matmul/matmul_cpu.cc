// oneDNN's sgemm was chosen over OpenBLAS 0.3.21 (Cooperlake core) for being 5 to 15 % faster at
// the shapes of training. GFLOP/s of one thread (AMD EPYC 9004, ceiling 117) when dnnl_sgemm and
// cblas_sgemm are called in a loop, third fastest of nine runs; `muster bench kernels` gives the
// numbers of the code below:
//
//   m x n x k                           oneDNN 2.6   OpenBLAS
//   2048 x  576 x  192  a·bᵀ                 106.6      101.5
//   2048 x  192 x  512  a·bᵀ                 108.4      102.0
//   2048 x  512 x  192  a·b                  112.9      103.3
//    576 x  192 x 2048  aᵀ·b, accumulated    115.4      100.9
//   4096 x  512 x  512  a·bᵀ                 108.4       98.4
//    512 x  512 x 4096  aᵀ·b, accumulated    110.1       99.6
#include <dnnl.h>

#include <algorithm>

#include "kernels/gelu/gelu.h"
#include "kernels/matmul/gemm_cpu.h"
#include "kernels/matmul/matmul.h"
#include "kernels/vector_math.h"

namespace muster::cpu {

namespace {

// sum[0, columns) += column sums of x [m, ld]. Blocks of rows are summed apart, so that the
// rounding error grows with the block and the number of blocks, not with m.
MUSTER_SIMD_CLONES void add_column_sums(float* sum, const float* x, int64_t ld, int64_t m,
                                        int64_t columns) {
  constexpr int64_t kRows = 128;
  constexpr int64_t kColumns = 64;
  for (int64_t j = 0; j < columns; j += kColumns) {
    const int64_t width = std::min(kColumns, columns - j);
    for (int64_t i = 0; i < m; i += kRows) {
      float part[kColumns] = {};
      for (int64_t row = i; row < std::min(i + kRows, m); ++row) {
        for (int64_t c = 0; c < width; ++c) part[c] += x[row * ld + j + c];
      }
      for (int64_t c = 0; c < width; ++c) sum[j + c] += part[c];
    }
  }
}

void add_column_sums(const TensorView& out, const ConstTensorView& x) {
  constexpr int64_t kColumns = 64;
  float* sum = out.data<float>();
  const float* from = x.data<float>();
  const int64_t m = x.size(0);
  const int64_t n = x.size(1);
#pragma omp parallel for schedule(static)
  for (int64_t j = 0; j < n; j += kColumns) {
    add_column_sums(sum + j, from + j, x.stride(0), m, std::min(kColumns, n - j));
  }
}

// to[0, n) = residual + bias, where an absent one (null) counts as zeros.
void start_row(float* to, const float* residual, const float* bias, int64_t n) {
  if (residual == nullptr) {
    std::copy_n(bias, n, to);
  } else if (bias == nullptr) {
    if (residual != to) std::copy_n(residual, n, to);
  } else {
    for (int64_t j = 0; j < n; ++j) to[j] = residual[j] + bias[j];
  }
}

Gemm make_gemm(const TensorView& out, const ConstTensorView& a, bool transpose_a,
               const ConstTensorView& b, bool transpose_b, bool accumulate) {
  return {.m = out.size(0),
          .n = out.size(1),
          .k = a.size(transpose_a ? 0 : 1),
          .a = a.data<float>(),
          .lda = a.stride(0),
          .transpose_a = transpose_a,
          .b = b.data<float>(),
          .ldb = b.stride(0),
          .transpose_b = transpose_b,
          .c = out.data<float>(),
          .ldc = out.stride(0),
          .beta = accumulate ? 1.0f : 0.0f};
}

}  // namespace

// Each block packs b again. In a·bᵀ, where that means transposing, 128 rows cost 1 % against one
// block, 64 rows 4 % and 32 rows 9 %; in the other products none of this shows.
int64_t gemm_block_rows(int64_t m) {
  return std::clamp<int64_t>((m / 8 + 15) / 16 * 16, 32, 256);
}

void gemm_rows(const Gemm& gemm, int64_t begin, int64_t end) {
  const int64_t m = end - begin;
  if (m <= 0 || gemm.n == 0) return;
  float* c = gemm.c + begin * gemm.ldc;
  if (gemm.k == 0) {
    for (int64_t i = 0; i < m && gemm.beta == 0.0f; ++i) std::fill_n(c + i * gemm.ldc, gemm.n, 0.f);
    return;
  }
  // The stride of a one-row matrix is arbitrary, but BLAS insists on a possible one.
  const int64_t lda = std::max(gemm.lda, gemm.transpose_a ? gemm.m : gemm.k);
  const int64_t ldb = std::max(gemm.ldb, gemm.transpose_b ? gemm.k : gemm.n);
  const dnnl_status_t status =
      dnnl_sgemm(gemm.transpose_a ? 'T' : 'N', gemm.transpose_b ? 'T' : 'N', m, gemm.n, gemm.k,
                 1.0f, gemm.a + begin * (gemm.transpose_a ? 1 : lda), lda, gemm.b, ldb, gemm.beta,
                 c, std::max(gemm.ldc, gemm.n));
  MUSTER_CHECK(status == dnnl_success, "dnnl_sgemm: status " + std::to_string(status));
}

void gemm_parallel(const Gemm& gemm) {
  const int64_t rows = gemm_block_rows(gemm.m);
  const int64_t blocks = (gemm.m + rows - 1) / rows;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < blocks; ++i) {
    gemm_rows(gemm, i * rows, std::min((i + 1) * rows, gemm.m));
  }
}

void matmul(const Stream&, TensorView out, ConstTensorView a, ConstTensorView b,
            const MatmulOptions& options) {
  gemm_parallel(make_gemm(out, a, options.transpose_a, b, options.transpose_b, options.accumulate));
}

void linear_forward(const Stream&, TensorView out, ConstTensorView x, ConstTensorView weight,
                    ConstTensorView bias, ConstTensorView residual) {
  const bool starts = bias.defined() || residual.defined();
  const Gemm gemm = make_gemm(out, x, false, weight, true, starts);
  if (!starts) return gemm_parallel(gemm);
  const float* each = bias.defined() ? bias.data<float>() : nullptr;
  const float* rest = residual.defined() ? residual.data<float>() : nullptr;
  const int64_t rows = gemm_block_rows(gemm.m);
  const int64_t blocks = (gemm.m + rows - 1) / rows;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t end = std::min((i + 1) * rows, gemm.m);
    for (int64_t row = i * rows; row < end; ++row) {
      const float* from = rest == nullptr ? nullptr : rest + row * residual.stride(0);
      start_row(gemm.c + row * gemm.ldc, from, each, gemm.n);
    }
    gemm_rows(gemm, i * rows, end);
  }
}

void linear_gelu_forward(const Stream& stream, TensorView out, TensorView hidden, ConstTensorView x,
                         ConstTensorView weight, ConstTensorView bias) {
  muster::linear_forward(stream, hidden, x, weight, bias);
  gelu_forward(stream, out, hidden);
}

void linear_backward(const Stream&, TensorView grad_x, TensorView grad_weight, TensorView grad_bias,
                     ConstTensorView grad_out, ConstTensorView x, ConstTensorView weight,
                     bool accumulate_weight) {
  if (grad_x.defined()) gemm_parallel(make_gemm(grad_x, grad_out, false, weight, false, false));
  if (grad_weight.defined()) {
    gemm_parallel(make_gemm(grad_weight, grad_out, true, x, false, accumulate_weight));
  }
  if (grad_bias.defined()) add_column_sums(grad_bias, grad_out);
}

void linear_gelu_backward(const Stream& stream, TensorView grad_hidden, TensorView grad_bias,
                          ConstTensorView grad_out, ConstTensorView weight,
                          ConstTensorView hidden) {
  const Tensor grad({hidden.size(0), hidden.size(1)}, DType::kFloat32);
  gemm_parallel(make_gemm(grad, grad_out, false, weight, false, false));
  gelu_backward(stream, grad_hidden, grad, hidden);
  if (grad_bias.defined()) add_column_sums(grad_bias, grad_hidden);
}

}  // namespace muster::cpu
