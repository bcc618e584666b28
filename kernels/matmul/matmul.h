// Matrix products. Row-major; the innermost stride is 1, the row stride may be larger (views into
// merged matrices).
#pragma once

#include "common/tensor.h"

namespace muster {

// out[M, N] = op(a) · op(b), or += when `accumulate`. op transposes when its flag is set: a is [M,
// K] ([K, M] if transpose_a), b is [K, N] ([N, K] if transpose_b). Products and sums are
// accumulated in float32. `out` overlaps neither input and has their dtype or, on CUDA, float32.
struct MatmulOptions {
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;
};
void matmul(const Stream& stream, TensorView out, ConstTensorView a, ConstTensorView b,
            const MatmulOptions& options = {});

// A linear layer with weight [N, K] (output features first, as in PyTorch): out[M, N] = x[M, K] ·
// weightᵀ + bias[N]. `bias` may be undefined.
void linear_forward(const Stream& stream, TensorView out, ConstTensorView x, ConstTensorView weight,
                    ConstTensorView bias = {});

// grad_x[M, K] = grad_out[M, N] · weight, or += when `accumulate_x`;
// grad_weight[N, K] += grad_outᵀ · x (float32, accumulates); grad_bias[N] += column sums of
// grad_out (float32, accumulates). Undefined results are left out.
void linear_backward(const Stream& stream, TensorView grad_x, TensorView grad_weight,
                     TensorView grad_bias, ConstTensorView grad_out, ConstTensorView x,
                     ConstTensorView weight, bool accumulate_x = false);

}  // namespace muster
