// Layer normalisation over the last dimension (Ba et al., 2016), biased variance.
#pragma once

#include "common/tensor.h"

namespace muster {

// out = (x − mean) · rstd · weight + bias, rstd = 1 / sqrt(var + eps). out, x [N, D]; weight, bias
// [D]; mean, rstd [N] float32. out may be x.
void layernorm_forward(const Stream& stream, TensorView out, TensorView mean, TensorView rstd,
                       ConstTensorView x, ConstTensorView weight, ConstTensorView bias, float eps);

// grad_x overwritten, or += when `accumulate_x`; grad_weight, grad_bias [D] float32, accumulate. x
// is the forward's input. grad_x may be grad_out.
void layernorm_backward(const Stream& stream, TensorView grad_x, TensorView grad_weight,
                        TensorView grad_bias, ConstTensorView grad_out, ConstTensorView x,
                        ConstTensorView weight, ConstTensorView mean, ConstTensorView rstd,
                        bool accumulate_x = false);

}  // namespace muster
