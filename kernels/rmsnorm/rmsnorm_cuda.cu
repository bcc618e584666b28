#include "kernels/cuda/norm_backward.cuh"
#include "kernels/rmsnorm/rmsnorm.h"

namespace muster::cuda {

void rmsnorm_forward(const Stream& stream, TensorView out, TensorView rstd, ConstTensorView x,
                     ConstTensorView weight, float eps) {
  norm_forward<false>(stream, out, nullptr, rstd.data<float>(), x, weight, nullptr, eps);
}

void rmsnorm_backward(const Stream& stream, TensorView grad_x, TensorView grad_weight,
                      ConstTensorView grad_out, ConstTensorView x, ConstTensorView weight,
                      ConstTensorView rstd, bool accumulate_x) {
  norm_backward<false>(stream, grad_x, grad_weight.data<float>(), nullptr, grad_out, x, weight,
                       nullptr, rstd.data<float>(), accumulate_x);
}

}  // namespace muster::cuda
