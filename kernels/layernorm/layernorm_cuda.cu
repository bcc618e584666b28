#include "kernels/cuda/norm_backward.cuh"
#include "kernels/layernorm/layernorm.h"

namespace muster::cuda {

void layernorm_forward(const Stream& stream, TensorView out, TensorView mean, TensorView rstd,
                       ConstTensorView x, ConstTensorView weight, ConstTensorView bias, float eps) {
  norm_forward<true>(stream, out, mean.data<float>(), rstd.data<float>(), x, weight, bias.raw(),
                     eps);
}

void layernorm_backward(const Stream& stream, TensorView grad_x, TensorView grad_weight,
                        TensorView grad_bias, ConstTensorView grad_out, ConstTensorView x,
                        ConstTensorView weight, ConstTensorView mean, ConstTensorView rstd,
                        bool accumulate_x) {
  norm_backward<true>(stream, grad_x, grad_weight.data<float>(), grad_bias.data<float>(), grad_out,
                      x, weight, mean.data<float>(), rstd.data<float>(), accumulate_x);
}

}  // namespace muster::cuda
