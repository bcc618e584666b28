#include <cmath>

#include "kernels/blocks.h"
#include "kernels/rows.h"
#include "kernels/swiglu/swiglu.h"
#include "kernels/vector_math.h"

namespace muster::cpu {
namespace {

MUSTER_SIMD_CLONES void forward_row(float* out, const float* gate, const float* up, int64_t f) {
#pragma omp simd
  for (int64_t i = 0; i < f; ++i) out[i] = gate[i] * fast_sigmoid(gate[i]) * up[i];
}

// silu'(x) = s + x · s · (1 − s) with s = sigmoid(x). With e = exp(−|x|), s · (1 − s) is e / (1 +
// e)², which does not cancel where s is close to 1.
MUSTER_SIMD_CLONES void backward_row(float* grad_gate, float* grad_up, const float* grad_out,
                                     const float* gate, const float* up, int64_t f) {
#pragma omp simd
  for (int64_t i = 0; i < f; ++i) {
    const float x = gate[i];
    const float e = fast_exp(-std::abs(x));
    const float q = 1.0f / (1.0f + e);
    const float s = x < 0.0f ? e * q : q;
    const float slope = std::fma(x * e * q, q, s);
    const float g = grad_out[i];
    grad_gate[i] = g * up[i] * slope;
    grad_up[i] = g * x * s;
  }
}

void raise_to_amax(const TensorView& amax, const ConstTensorView& x) {
  if (!amax.defined()) return;
  float* to = amax.data<float>();
  const Rows rows(x);
  for (int64_t n = 0; n < x.size(0); ++n) {
    for (int64_t i = 0; i < x.size(1); ++i) *to = std::fmax(*to, std::abs(rows[n][i]));
  }
}

}  // namespace

void swiglu_forward(const Stream&, TensorView out, ConstTensorView gate_up, TensorView amax) {
  const int64_t n = out.size(0);
  const int64_t f = out.size(1);
  const Rows to(out);
  const Rows from(gate_up);
#pragma omp parallel for schedule(static) if (n * f >= kParallelElements)
  for (int64_t row = 0; row < n; ++row) forward_row(to[row], from[row], from[row] + f, f);
  raise_to_amax(amax, out);
}

void swiglu_backward(const Stream&, TensorView grad_gate_up, ConstTensorView grad_out,
                     ConstTensorView gate_up, TensorView amax) {
  const int64_t n = grad_out.size(0);
  const int64_t f = grad_out.size(1);
  const Rows to(grad_gate_up);
  const Rows grad(grad_out);
  const Rows from(gate_up);
#pragma omp parallel for schedule(static) if (n * f >= kParallelElements)
  for (int64_t row = 0; row < n; ++row) {
    // In place, grad_up must not overwrite an `up` that is still to be read: backward_row reads
    // element i of all inputs before it writes element i of any result.
    backward_row(to[row], to[row] + f, grad[row], from[row], from[row] + f, f);
  }
  raise_to_amax(amax, grad_gate_up);
}

}  // namespace muster::cpu
