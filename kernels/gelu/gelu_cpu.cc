#include <cmath>

#include "kernels/blocks.h"
#include "kernels/gelu/gelu.h"
#include "kernels/vector_math.h"

namespace muster::cpu {
namespace {

// (1 + tanh(u)) / 2 = sigmoid(2u), with 2u = x · (kLinear + kCubic · x²).
constexpr float kLinear = 1.5957691216057308f;   // 2 √(2/π)
constexpr float kCubic = 0.071354816272600251f;  // 2 √(2/π) · 0.044715

MUSTER_SIMD_CLONES void forward(float* out, const float* x, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float value = x[i];
    out[i] = value * fast_sigmoid(value * std::fma(kCubic * value, value, kLinear));
  }
}

MUSTER_SIMD_CLONES void backward(float* grad_x, const float* grad_out, const float* x, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float value = x[i];
    const float twice_u = value * std::fma(kCubic * value, value, kLinear);
    // s · (1 − s) as e / (1 + e)²: 1 − s would cancel where s is close to 1, and the inner slope
    // is large there.
    const float e = fast_exp(-std::abs(twice_u));
    const float q = 1.0f / (1.0f + e);
    const float s = twice_u < 0.0f ? e * q : q;
    const float inner_slope = std::fma(3.0f * kCubic * value, value, kLinear);
    grad_x[i] = grad_out[i] * std::fma(value * e * q * q, inner_slope, s);
  }
}

}  // namespace

void gelu_forward(const Stream&, TensorView out, ConstTensorView x) {
  float* to = out.data<float>();
  const float* from = x.data<float>();
  for_blocks(x.numel(),
             [=](int64_t begin, int64_t end) { forward(to + begin, from + begin, end - begin); });
}

void gelu_backward(const Stream&, TensorView grad_x, ConstTensorView grad_out, ConstTensorView x) {
  float* to = grad_x.data<float>();
  const float* grad = grad_out.data<float>();
  const float* from = x.data<float>();
  for_blocks(x.numel(), [=](int64_t begin, int64_t end) {
    backward(to + begin, grad + begin, from + begin, end - begin);
  });
}

}  // namespace muster::cpu
