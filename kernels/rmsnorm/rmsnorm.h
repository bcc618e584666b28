// Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019).
#pragma once

#include "common/tensor.h"

namespace muster {

// rstd[n] = 1 / sqrt(mean(x[n, :]²) + eps); out[n, d] = x[n, d] · rstd[n] · weight[d].
// out, x [N, D] or [N, H, D] with any outer strides, so that x can be the heads of a QKV buffer;
// weight [D]; rstd [N] or [N, H] float32, contiguous. out may be x.
void rmsnorm_forward(const Stream& stream, TensorView out, TensorView rstd, ConstTensorView x,
                     ConstTensorView weight, float eps);

// With g = grad_out · weight: grad_x = rstd · (g − x · rstd² · mean(g · x)), or += when
// `accumulate_x`. grad_weight[d] += Σ_n grad_out · x · rstd (float32, accumulates). x is the
// forward's input. grad_x may be grad_out.
void rmsnorm_backward(const Stream& stream, TensorView grad_x, TensorView grad_weight,
                      ConstTensorView grad_out, ConstTensorView x, ConstTensorView weight,
                      ConstTensorView rstd, bool accumulate_x = false);

}  // namespace muster
