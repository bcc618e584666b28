#include <cmath>
#include <cstring>

#include "kernels/layernorm/layernorm.h"
#include "kernels/row_math.h"
#include "kernels/rows.h"

namespace muster::cpu {
namespace {

// The variance takes a second look at the row, which is in the cache: E[x²] − E[x]² in one look
// cancels when the mean is large.
MUSTER_SIMD_CLONES void forward_row(float* out, float* mean_out, float* rstd_out, const float* x,
                                    const float* weight, const float* bias, int64_t d, float eps) {
  const float sum = row_sum(
      d, [=]<typename F>(int64_t i) __attribute__((always_inline)) { return load_as<F>(x + i); });
  const float mean = sum / static_cast<float>(d);
  const float squares = row_sum(
      d, [=]<typename F>(int64_t i) __attribute__((always_inline)) {
        const F centered = load_as<F>(x + i) - mean;
        return centered * centered;
      });
  const float rstd = 1.0f / std::sqrt(squares / static_cast<float>(d) + eps);
#pragma omp simd
  for (int64_t i = 0; i < d; ++i) out[i] = std::fma((x[i] - mean) * rstd, weight[i], bias[i]);
  *mean_out = mean;
  *rstd_out = rstd;
}

struct Row {
  const float* grad_out;
  const float* x;
  const float* weight;
  int64_t d;
  float mean;
  float rstd;
};

// Writes the row of grad_x and adds the row's parts of the weight's and the bias's gradients.
template <bool kAccumulate>
MUSTER_INLINE void backward_row_as(float* grad_x, float* weight_sum, float* bias_sum,
                                   const Row& row) {
  const Row r = row;
  const float n = static_cast<float>(r.d);
  const float grad_mean = row_sum(
                              r.d,
                              [=]<typename F>(int64_t i) __attribute__((always_inline)) {
                                return load_as<F>(r.grad_out + i) * load_as<F>(r.weight + i);
                              }) /
                          n;
  const float along_x =
      row_sum(
          r.d,
          [=]<typename F>(int64_t i) __attribute__((always_inline)) {
            const F normalised = (load_as<F>(r.x + i) - r.mean) * r.rstd;
            return load_as<F>(r.grad_out + i) * load_as<F>(r.weight + i) * normalised;
          }) /
      n;
#pragma omp simd
  for (int64_t i = 0; i < r.d; ++i) {
    const float g = r.grad_out[i];
    const float normalised = (r.x[i] - r.mean) * r.rstd;
    weight_sum[i] += g * normalised;
    bias_sum[i] += g;
    const float grad =
        r.rstd * std::fma(-normalised, along_x, std::fma(g, r.weight[i], -grad_mean));
    grad_x[i] = kAccumulate ? grad_x[i] + grad : grad;
  }
}
MUSTER_SIMD_CLONES void backward_row(float* grad_x, float* weight_sum, float* bias_sum,
                                     const Row& row, bool accumulate) {
  if (accumulate) {
    backward_row_as<true>(grad_x, weight_sum, bias_sum, row);
  } else {
    backward_row_as<false>(grad_x, weight_sum, bias_sum, row);
  }
}

}  // namespace

void layernorm_forward(const Stream&, TensorView out, TensorView mean, TensorView rstd,
                       ConstTensorView x, ConstTensorView weight, ConstTensorView bias, float eps) {
  const int64_t n = x.size(0);
  const int64_t d = x.size(1);
  const Rows to(out);
  const Rows from(x);
  float* means = mean.data<float>();
  float* scales = rstd.data<float>();
  const float* w = weight.data<float>();
  const float* b = bias.data<float>();
#pragma omp parallel for schedule(static) if (n * d >= kParallelElements)
  for (int64_t row = 0; row < n; ++row) {
    forward_row(to[row], means + row, scales + row, from[row], w, b, d, eps);
  }
}

void layernorm_backward(const Stream&, TensorView grad_x, TensorView grad_weight,
                        TensorView grad_bias, ConstTensorView grad_out, ConstTensorView x,
                        ConstTensorView weight, ConstTensorView mean, ConstTensorView rstd,
                        bool accumulate_x) {
  const int64_t d = x.size(1);
  const RowBlocks blocks(x.size(0));
  const Tensor partials({2, blocks.count, d}, DType::kFloat32);
  const Rows to(grad_x);
  const Rows from(grad_out);
  const Rows input(x);
  const float* means = mean.data<float>();
  const float* scales = rstd.data<float>();
  const float* w = weight.data<float>();
  float* weight_sums = partials.data<float>();
  float* bias_sums = weight_sums + blocks.count * d;
#pragma omp parallel for schedule(static) if (blocks.rows * d >= kParallelElements)
  for (int64_t block = 0; block < blocks.count; ++block) {
    float* weight_sum = weight_sums + block * d;
    float* bias_sum = bias_sums + block * d;
    std::memset(weight_sum, 0, d * sizeof(float));
    std::memset(bias_sum, 0, d * sizeof(float));
    for (int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
      backward_row(to[row], weight_sum, bias_sum,
                   {from[row], input[row], w, d, means[row], scales[row]}, accumulate_x);
    }
  }
  add_partials(grad_weight.data<float>(), weight_sums, blocks.count, d);
  add_partials(grad_bias.data<float>(), bias_sums, blocks.count, d);
}

}  // namespace muster::cpu
