// GELU, tanh approximation (Hendrycks and Gimpel, 2016), as in GPT-2:
// x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).
#pragma once

#include "common/tensor.h"

namespace muster {

// out, x: any shape, contiguous. out may be x.
void gelu_forward(const Stream& stream, TensorView out, ConstTensorView x);

// grad_x overwritten; may be grad_out or x. x is the forward's input.
void gelu_backward(const Stream& stream, TensorView grad_x, ConstTensorView grad_out,
                   ConstTensorView x);

}  // namespace muster
