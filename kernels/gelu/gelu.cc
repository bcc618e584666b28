#include "kernels/gelu/gelu.h"

#include "kernels/dispatch.h"

namespace muster {

MUSTER_TWINS(void gelu_forward(const Stream& stream, TensorView out, ConstTensorView x);
             void gelu_backward(const Stream& stream, TensorView grad_x, ConstTensorView grad_out,
                                ConstTensorView x);)

namespace {

void check_like(const Stream& stream, const ConstTensorView& view, const ConstTensorView& x) {
  MUSTER_CHECK(view.shape() == x.shape(),
               view.shape().to_string() + " for " + x.shape().to_string());
  MUSTER_CHECK(view.dtype() == x.dtype() && view.contiguous(), name_of(view.dtype()));
  MUSTER_CHECK(view.device() == stream.device);
}

}  // namespace

void gelu_forward(const Stream& stream, TensorView out, ConstTensorView x) {
  check_like(stream, x, x);
  check_like(stream, out, x);
  MUSTER_DISPATCH(stream, gelu_forward(stream, out, x));
}

void gelu_backward(const Stream& stream, TensorView grad_x, ConstTensorView grad_out,
                   ConstTensorView x) {
  check_like(stream, x, x);
  check_like(stream, grad_out, x);
  check_like(stream, grad_x, x);
  MUSTER_DISPATCH(stream, gelu_backward(stream, grad_x, grad_out, x));
}

}  // namespace muster
