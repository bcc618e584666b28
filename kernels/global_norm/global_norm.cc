#include "kernels/global_norm/global_norm.h"

#include "kernels/dispatch.h"

namespace muster {

MUSTER_TWINS(void sum_of_squares(const Stream& stream, TensorView sum, ConstTensorView x);)

void sum_of_squares(const Stream& stream, TensorView sum, ConstTensorView x) {
  MUSTER_CHECK(sum.numel() == 1 && sum.dtype() == DType::kFloat64, name_of(sum.dtype()));
  MUSTER_CHECK(x.dtype() == DType::kFloat32 && x.contiguous(), name_of(x.dtype()));
  MUSTER_CHECK(sum.device() == stream.device && x.device() == stream.device);
  MUSTER_DISPATCH(stream, sum_of_squares(stream, sum, x));
}

}  // namespace muster
