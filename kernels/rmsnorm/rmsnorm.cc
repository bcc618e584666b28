#include "kernels/rmsnorm/rmsnorm.h"

#include "kernels/dispatch.h"
#include "kernels/rows.h"

namespace muster {

MUSTER_TWINS(void rmsnorm_forward(const Stream& stream, TensorView out, TensorView rstd,
                                  ConstTensorView x, ConstTensorView weight, float eps);
             void rmsnorm_backward(const Stream& stream, TensorView grad_x, TensorView grad_weight,
                                   ConstTensorView grad_out, ConstTensorView x,
                                   ConstTensorView weight, ConstTensorView rstd,
                                   bool accumulate_x);)

namespace {

// What `like` x must hold: its shape, dtype and device, dense rows.
void check_like(const Stream& stream, const ConstTensorView& like, const ConstTensorView& x) {
  MUSTER_CHECK(like.rank() == 2 || like.rank() == 3, like.shape().to_string());
  MUSTER_CHECK(like.shape() == x.shape(),
               like.shape().to_string() + " for " + x.shape().to_string());
  MUSTER_CHECK(like.dtype() == x.dtype() && rows_are_dense(like), name_of(like.dtype()));
  MUSTER_CHECK(like.device() == stream.device);
}

void check_row_values(const Stream& stream, const ConstTensorView& rstd,
                      const ConstTensorView& weight, const ConstTensorView& x) {
  const int64_t d = x.size(x.rank() - 1);
  MUSTER_CHECK(d > 0 && rstd.numel() * d == x.numel() && rstd.contiguous(),
               rstd.shape().to_string() + " for " + x.shape().to_string());
  MUSTER_CHECK(rstd.dtype() == DType::kFloat32, name_of(rstd.dtype()));
  MUSTER_CHECK(weight.rank() == 1 && weight.numel() == d && weight.contiguous(),
               weight.shape().to_string() + " for " + x.shape().to_string());
  MUSTER_CHECK(weight.dtype() == x.dtype(), name_of(weight.dtype()));
  MUSTER_CHECK(rstd.device() == stream.device && weight.device() == stream.device);
}

}  // namespace

void rmsnorm_forward(const Stream& stream, TensorView out, TensorView rstd, ConstTensorView x,
                     ConstTensorView weight, float eps) {
  check_like(stream, out, x);
  check_like(stream, x, x);
  check_row_values(stream, rstd, weight, x);
  MUSTER_DISPATCH(stream, rmsnorm_forward(stream, out, rstd, x, weight, eps));
}

void rmsnorm_backward(const Stream& stream, TensorView grad_x, TensorView grad_weight,
                      ConstTensorView grad_out, ConstTensorView x, ConstTensorView weight,
                      ConstTensorView rstd, bool accumulate_x) {
  check_like(stream, grad_x, x);
  check_like(stream, grad_out, x);
  check_like(stream, x, x);
  check_row_values(stream, rstd, weight, x);
  MUSTER_CHECK(grad_weight.shape() == weight.shape() && grad_weight.contiguous(),
               grad_weight.shape().to_string());
  MUSTER_CHECK(grad_weight.dtype() == DType::kFloat32 && grad_weight.device() == stream.device);
  MUSTER_DISPATCH(stream, rmsnorm_backward(stream, grad_x, grad_weight, grad_out, x, weight, rstd,
                                           accumulate_x));
}

}  // namespace muster
