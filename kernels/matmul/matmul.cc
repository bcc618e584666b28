#include "kernels/matmul/matmul.h"

#include "kernels/dispatch.h"

namespace muster {

MUSTER_TWINS(void matmul(const Stream& stream, TensorView out, ConstTensorView a, ConstTensorView b,
                         const MatmulOptions& options);
             void linear_forward(const Stream& stream, TensorView out, ConstTensorView x,
                                 ConstTensorView weight, ConstTensorView bias);
             void linear_backward(const Stream& stream, TensorView grad_x, TensorView grad_weight,
                                  TensorView grad_bias, ConstTensorView grad_out, ConstTensorView x,
                                  ConstTensorView weight, bool accumulate_x);)

namespace {

// A matrix whose rows may lie apart, but do not overlap.
void check_matrix(const ConstTensorView& x, const Stream& stream, int64_t rows, int64_t columns,
                  const char* name) {
  MUSTER_CHECK(x.rank() == 2 && x.size(0) == rows && x.size(1) == columns,
               std::string(name) + " " + x.shape().to_string() + ", expected " +
                   Shape{rows, columns}.to_string());
  MUSTER_CHECK(columns <= 1 || x.stride(1) == 1, name);
  MUSTER_CHECK(rows <= 1 || x.stride(0) >= columns, name);
  MUSTER_CHECK(x.device() == stream.device, name);
}

void check_vector(const ConstTensorView& x, const Stream& stream, int64_t n, const char* name) {
  MUSTER_CHECK(x.rank() == 1 && x.size(0) == n && x.contiguous() && x.device() == stream.device,
               std::string(name) + " " + x.shape().to_string());
}

}  // namespace

void matmul(const Stream& stream, TensorView out, ConstTensorView a, ConstTensorView b,
            const MatmulOptions& options) {
  MUSTER_CHECK(out.rank() == 2 && a.rank() == 2);
  const int64_t m = out.size(0);
  const int64_t n = out.size(1);
  const int64_t k = a.size(options.transpose_a ? 0 : 1);
  check_matrix(out, stream, m, n, "out");
  check_matrix(a, stream, options.transpose_a ? k : m, options.transpose_a ? m : k, "a");
  check_matrix(b, stream, options.transpose_b ? n : k, options.transpose_b ? k : n, "b");
  MUSTER_CHECK(a.dtype() == b.dtype());
  MUSTER_DISPATCH(stream, matmul(stream, out, a, b, options));
}

void linear_forward(const Stream& stream, TensorView out, ConstTensorView x, ConstTensorView weight,
                    ConstTensorView bias) {
  MUSTER_CHECK(x.rank() == 2 && weight.rank() == 2);
  const int64_t m = x.size(0);
  const int64_t k = x.size(1);
  const int64_t n = weight.size(0);
  check_matrix(out, stream, m, n, "out");
  check_matrix(x, stream, m, k, "x");
  check_matrix(weight, stream, n, k, "weight");
  if (bias.defined()) check_vector(bias, stream, n, "bias");
  MUSTER_CHECK(x.dtype() == weight.dtype() && out.dtype() == x.dtype());
  MUSTER_DISPATCH(stream, linear_forward(stream, out, x, weight, bias));
}

void linear_backward(const Stream& stream, TensorView grad_x, TensorView grad_weight,
                     TensorView grad_bias, ConstTensorView grad_out, ConstTensorView x,
                     ConstTensorView weight, bool accumulate_x) {
  MUSTER_CHECK(grad_out.rank() == 2);
  const int64_t m = grad_out.size(0);
  const int64_t n = grad_out.size(1);
  check_matrix(grad_out, stream, m, n, "grad_out");
  if (grad_x.defined()) {
    check_matrix(grad_x, stream, m, grad_x.size(1), "grad_x");
    check_matrix(weight, stream, n, grad_x.size(1), "weight");
    MUSTER_CHECK(grad_out.dtype() == weight.dtype());
  }
  if (grad_weight.defined()) {
    check_matrix(grad_weight, stream, n, grad_weight.size(1), "grad_weight");
    check_matrix(x, stream, m, grad_weight.size(1), "x");
    MUSTER_CHECK(grad_weight.dtype() == DType::kFloat32 && grad_out.dtype() == x.dtype());
  }
  if (grad_bias.defined()) {
    check_vector(grad_bias, stream, n, "grad_bias");
    MUSTER_CHECK(grad_bias.dtype() == DType::kFloat32);
  }
  MUSTER_DISPATCH(stream, linear_backward(stream, grad_x, grad_weight, grad_bias, grad_out, x,
                                          weight, accumulate_x));
}

}  // namespace muster
