// SwiGLU (Shazeer, 2020) on a merged gate/up product.
#pragma once

#include "common/tensor.h"

namespace muster {

// out[n, f] = silu(gate) · up, gate = gate_up[n, f], up = gate_up[n, F + f]; silu(x) = x / (1 +
// e^−x). out [N, F]; gate_up [N, 2F]. amax [1] float32, if defined, is raised to the largest
// magnitude of the result where that is larger (NaN counts as nothing): for fp8_quantise.
void swiglu_forward(const Stream& stream, TensorView out, ConstTensorView gate_up,
                    TensorView amax = {});

// grad_gate_up [N, 2F] overwritten; may be gate_up. amax as above.
void swiglu_backward(const Stream& stream, TensorView grad_gate_up, ConstTensorView grad_out,
                     ConstTensorView gate_up, TensorView amax = {});

}  // namespace muster
