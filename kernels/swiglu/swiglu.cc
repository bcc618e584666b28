#include "kernels/swiglu/swiglu.h"

#include "kernels/dispatch.h"
#include "kernels/rows.h"

namespace muster {

MUSTER_TWINS(void swiglu_forward(const Stream& stream, TensorView out, ConstTensorView gate_up,
                                 TensorView amax);
             void swiglu_backward(const Stream& stream, TensorView grad_gate_up,
                                  ConstTensorView grad_out, ConstTensorView gate_up,
                                  TensorView amax);)

namespace {

// `half` [N, F] belongs to `gate_up` [N, 2F].
void check_shapes(const Stream& stream, const ConstTensorView& half,
                  const ConstTensorView& gate_up) {
  MUSTER_CHECK(half.rank() == 2 && gate_up.rank() == 2 && half.size(0) == gate_up.size(0) &&
                   2 * half.size(1) == gate_up.size(1),
               half.shape().to_string() + " for " + gate_up.shape().to_string());
  MUSTER_CHECK(half.dtype() == gate_up.dtype(), name_of(half.dtype()));
  MUSTER_CHECK(rows_are_dense(half) && rows_are_dense(gate_up));
  MUSTER_CHECK(half.device() == stream.device && gate_up.device() == stream.device);
}

void check_amax(const Stream& stream, const ConstTensorView& amax) {
  if (!amax.defined()) return;
  MUSTER_CHECK(amax.numel() == 1 && amax.dtype() == DType::kFloat32 &&
               amax.device() == stream.device);
}

}  // namespace

void swiglu_forward(const Stream& stream, TensorView out, ConstTensorView gate_up,
                    TensorView amax) {
  check_shapes(stream, out, gate_up);
  check_amax(stream, amax);
  MUSTER_DISPATCH(stream, swiglu_forward(stream, out, gate_up, amax));
}

void swiglu_backward(const Stream& stream, TensorView grad_gate_up, ConstTensorView grad_out,
                     ConstTensorView gate_up, TensorView amax) {
  check_shapes(stream, grad_out, gate_up);
  check_shapes(stream, grad_out, grad_gate_up);
  check_amax(stream, amax);
  MUSTER_DISPATCH(stream, swiglu_backward(stream, grad_gate_up, grad_out, gate_up, amax));
}

}  // namespace muster
