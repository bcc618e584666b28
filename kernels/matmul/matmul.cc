#include "kernels/matmul/matmul.h"

#include "kernels/dispatch.h"

namespace muster {

MUSTER_TWINS(void matmul(const Stream& stream, TensorView out, ConstTensorView a, ConstTensorView b,
                         const MatmulOptions& options);
             void linear_forward(const Stream& stream, TensorView out, ConstTensorView x,
                                 ConstTensorView weight, ConstTensorView bias,
                                 ConstTensorView residual);
             void linear_gelu_forward(const Stream& stream, TensorView out, TensorView hidden,
                                      ConstTensorView x, ConstTensorView weight,
                                      ConstTensorView bias);
             void linear_backward(const Stream& stream, TensorView grad_x, TensorView grad_weight,
                                  TensorView grad_bias, ConstTensorView grad_out, ConstTensorView x,
                                  ConstTensorView weight, bool accumulate_weight);
             void linear_gelu_backward(const Stream& stream, TensorView grad_hidden,
                                       TensorView grad_bias, ConstTensorView grad_out,
                                       ConstTensorView weight, ConstTensorView hidden);)

namespace cuda {
void set_matmul_measured(bool measured);
}

void set_matmul_measured([[maybe_unused]] bool measured) {
#ifdef MUSTER_WITH_CUDA
  cuda::set_matmul_measured(measured);
#endif
}

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

// x, weight and bias of a linear layer with this result.
void check_layer(const Stream& stream, const ConstTensorView& out, const ConstTensorView& x,
                 const ConstTensorView& weight, const ConstTensorView& bias) {
  MUSTER_CHECK(x.rank() == 2 && weight.rank() == 2);
  const int64_t n = weight.size(0);
  check_matrix(out, stream, x.size(0), n, "out");
  check_matrix(x, stream, x.size(0), x.size(1), "x");
  check_matrix(weight, stream, n, x.size(1), "weight");
  MUSTER_CHECK(x.dtype() == weight.dtype() && out.dtype() == x.dtype());
  if (!bias.defined()) return;
  check_vector(bias, stream, n, "bias");
  MUSTER_CHECK(bias.dtype() == x.dtype());
}

void check_grad_bias(const ConstTensorView& grad_bias, const Stream& stream, int64_t n) {
  check_vector(grad_bias, stream, n, "grad_bias");
  MUSTER_CHECK(grad_bias.dtype() == DType::kFloat32);
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
                    ConstTensorView bias, ConstTensorView residual) {
  check_layer(stream, out, x, weight, bias);
  if (residual.defined()) {
    check_matrix(residual, stream, out.size(0), out.size(1), "residual");
    MUSTER_CHECK(residual.dtype() == out.dtype());
  }
  MUSTER_DISPATCH(stream, linear_forward(stream, out, x, weight, bias, residual));
}

void linear_gelu_forward(const Stream& stream, TensorView out, TensorView hidden, ConstTensorView x,
                         ConstTensorView weight, ConstTensorView bias) {
  check_layer(stream, hidden, x, weight, bias);
  check_matrix(out, stream, hidden.size(0), hidden.size(1), "out");
  MUSTER_CHECK(out.dtype() == hidden.dtype() && out.contiguous() && hidden.contiguous());
  MUSTER_DISPATCH(stream, linear_gelu_forward(stream, out, hidden, x, weight, bias));
}

void linear_backward(const Stream& stream, TensorView grad_x, TensorView grad_weight,
                     TensorView grad_bias, ConstTensorView grad_out, ConstTensorView x,
                     ConstTensorView weight, bool accumulate_weight) {
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
  if (grad_bias.defined()) check_grad_bias(grad_bias, stream, n);
  MUSTER_DISPATCH(stream, linear_backward(stream, grad_x, grad_weight, grad_bias, grad_out, x,
                                          weight, accumulate_weight));
}

void linear_gelu_backward(const Stream& stream, TensorView grad_hidden, TensorView grad_bias,
                          ConstTensorView grad_out, ConstTensorView weight,
                          ConstTensorView hidden) {
  MUSTER_CHECK(grad_out.rank() == 2 && hidden.rank() == 2);
  const int64_t m = grad_out.size(0);
  const int64_t n = grad_out.size(1);
  const int64_t k = hidden.size(1);
  check_matrix(grad_out, stream, m, n, "grad_out");
  check_matrix(weight, stream, n, k, "weight");
  check_matrix(hidden, stream, m, k, "hidden");
  check_matrix(grad_hidden, stream, m, k, "grad_hidden");
  MUSTER_CHECK(grad_hidden.contiguous() && hidden.contiguous());
  MUSTER_CHECK(grad_out.dtype() == weight.dtype() && hidden.dtype() == weight.dtype() &&
               grad_hidden.dtype() == weight.dtype());
  if (grad_bias.defined()) check_grad_bias(grad_bias, stream, k);
  MUSTER_DISPATCH(stream,
                  linear_gelu_backward(stream, grad_hidden, grad_bias, grad_out, weight, hidden));
}

}  // namespace muster
