#include <cmath>
#include <cstring>

#include "kernels/rmsnorm/rmsnorm.h"
#include "kernels/row_math.h"
#include "kernels/rows.h"

namespace muster::cpu {
namespace {

// Returns the row's rstd.
MUSTER_SIMD_CLONES float forward_row(float* out, const float* x, const float* weight, int64_t d,
                                     float eps) {
  const float squares = row_sum(
      d, [=]<typename F>(int64_t i) __attribute__((always_inline)) {
        const F value = load_as<F>(x + i);
        return value * value;
      });
  const float rstd = 1.0f / std::sqrt(squares / static_cast<float>(d) + eps);
#pragma omp simd
  for (int64_t i = 0; i < d; ++i) out[i] = x[i] * rstd * weight[i];
  return rstd;
}

// Writes the row of grad_x and adds the row's part of the weight gradient.
template <bool kAccumulate>
MUSTER_INLINE void backward_row_as(float* grad_x, float* weight_sum, const float* grad_out,
                                   const float* x, const float* weight, int64_t d, float rstd) {
  const float product = row_sum(
      d, [=]<typename F>(int64_t i) __attribute__((always_inline)) {
        return load_as<F>(grad_out + i) * load_as<F>(weight + i) * load_as<F>(x + i);
      });
  const float along_x = rstd * rstd * product / static_cast<float>(d);
#pragma omp simd
  for (int64_t i = 0; i < d; ++i) {
    const float g = grad_out[i];
    weight_sum[i] += g * x[i] * rstd;
    const float grad = rstd * std::fma(-x[i], along_x, g * weight[i]);
    grad_x[i] = kAccumulate ? grad_x[i] + grad : grad;
  }
}
MUSTER_SIMD_CLONES void backward_row(float* grad_x, float* weight_sum, const float* grad_out,
                                     const float* x, const float* weight, int64_t d, float rstd,
                                     bool accumulate) {
  if (accumulate) {
    backward_row_as<true>(grad_x, weight_sum, grad_out, x, weight, d, rstd);
  } else {
    backward_row_as<false>(grad_x, weight_sum, grad_out, x, weight, d, rstd);
  }
}

}  // namespace

void rmsnorm_forward(const Stream&, TensorView out, TensorView rstd, ConstTensorView x,
                     ConstTensorView weight, float eps) {
  const int64_t rows = rstd.numel();
  const int64_t d = weight.numel();
  const Rows to(out);
  const Rows from(x);
  float* scale = rstd.data<float>();
  const float* w = weight.data<float>();
#pragma omp parallel for schedule(static) if (rows * d >= kParallelElements)
  for (int64_t row = 0; row < rows; ++row) {
    scale[row] = forward_row(to[row], from[row], w, d, eps);
  }
}

void rmsnorm_backward(const Stream&, TensorView grad_x, TensorView grad_weight,
                      ConstTensorView grad_out, ConstTensorView x, ConstTensorView weight,
                      ConstTensorView rstd, bool accumulate_x) {
  const int64_t d = weight.numel();
  const RowBlocks blocks(rstd.numel());
  const Tensor partials({blocks.count, d}, DType::kFloat32);
  const Rows to(grad_x);
  const Rows from(grad_out);
  const Rows input(x);
  const float* w = weight.data<float>();
  const float* scale = rstd.data<float>();
  float* sums = partials.data<float>();
#pragma omp parallel for schedule(static) if (blocks.rows * d >= kParallelElements)
  for (int64_t block = 0; block < blocks.count; ++block) {
    float* sum = sums + block * d;
    std::memset(sum, 0, d * sizeof(float));
    for (int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
      backward_row(to[row], sum, from[row], input[row], w, d, scale[row], accumulate_x);
    }
  }
  add_partials(grad_weight.data<float>(), sums, blocks.count, d);
}

}  // namespace muster::cpu
