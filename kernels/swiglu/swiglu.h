// SwiGLU (Shazeer, 2020) on a merged gate/up product.
#pragma once

#include "common/tensor.h"

namespace muster {

// out[n, f] = silu(gate) · up, gate = gate_up[n, f], up = gate_up[n, F + f]; silu(x) = x / (1 +
// e^−x). out [N, F]; gate_up [N, 2F].
void swiglu_forward(const Stream& stream, TensorView out, ConstTensorView gate_up);

// grad_gate_up [N, 2F] overwritten; may be gate_up.
void swiglu_backward(const Stream& stream, TensorView grad_gate_up, ConstTensorView grad_out,
                     ConstTensorView gate_up);

}  // namespace muster
