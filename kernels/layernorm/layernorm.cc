#include "kernels/layernorm/layernorm.h"

#include "kernels/dispatch.h"
#include "kernels/rows.h"

namespace muster {

MUSTER_TWINS(void layernorm_forward(const Stream& stream, TensorView out, TensorView mean,
                                    TensorView rstd, ConstTensorView x, ConstTensorView weight,
                                    ConstTensorView bias, float eps);
             void layernorm_backward(const Stream& stream, TensorView grad_x,
                                     TensorView grad_weight, TensorView grad_bias,
                                     ConstTensorView grad_out, ConstTensorView x,
                                     ConstTensorView weight, ConstTensorView mean,
                                     ConstTensorView rstd, bool accumulate_x);)

namespace {

void check_matrix(const Stream& stream, const ConstTensorView& matrix, const ConstTensorView& x) {
  MUSTER_CHECK(matrix.rank() == 2 && matrix.shape() == x.shape(),
               matrix.shape().to_string() + " for " + x.shape().to_string());
  MUSTER_CHECK(matrix.dtype() == x.dtype() && rows_are_dense(matrix), name_of(matrix.dtype()));
  MUSTER_CHECK(matrix.device() == stream.device);
}

void check_vector(const Stream& stream, const ConstTensorView& vector, int64_t size, DType dtype) {
  MUSTER_CHECK(vector.rank() == 1 && vector.numel() == size && vector.contiguous(),
               vector.shape().to_string() + ", expected " + std::to_string(size));
  MUSTER_CHECK(vector.dtype() == dtype, name_of(vector.dtype()));
  MUSTER_CHECK(vector.device() == stream.device);
}

}  // namespace

void layernorm_forward(const Stream& stream, TensorView out, TensorView mean, TensorView rstd,
                       ConstTensorView x, ConstTensorView weight, ConstTensorView bias, float eps) {
  check_matrix(stream, out, x);
  check_matrix(stream, x, x);
  MUSTER_CHECK(x.size(1) > 0);
  check_vector(stream, mean, x.size(0), DType::kFloat32);
  check_vector(stream, rstd, x.size(0), DType::kFloat32);
  check_vector(stream, weight, x.size(1), x.dtype());
  check_vector(stream, bias, x.size(1), x.dtype());
  MUSTER_DISPATCH(stream, layernorm_forward(stream, out, mean, rstd, x, weight, bias, eps));
}

void layernorm_backward(const Stream& stream, TensorView grad_x, TensorView grad_weight,
                        TensorView grad_bias, ConstTensorView grad_out, ConstTensorView x,
                        ConstTensorView weight, ConstTensorView mean, ConstTensorView rstd,
                        bool accumulate_x) {
  check_matrix(stream, grad_x, x);
  check_matrix(stream, grad_out, x);
  check_matrix(stream, x, x);
  MUSTER_CHECK(x.size(1) > 0);
  check_vector(stream, mean, x.size(0), DType::kFloat32);
  check_vector(stream, rstd, x.size(0), DType::kFloat32);
  check_vector(stream, weight, x.size(1), x.dtype());
  check_vector(stream, grad_weight, x.size(1), DType::kFloat32);
  check_vector(stream, grad_bias, x.size(1), DType::kFloat32);
  MUSTER_DISPATCH(stream, layernorm_backward(stream, grad_x, grad_weight, grad_bias, grad_out, x,
                                             weight, mean, rstd, accumulate_x));
}

}  // namespace muster
