#include "kernels/cross_entropy/cross_entropy.h"

#include "kernels/dispatch.h"

namespace muster {

MUSTER_TWINS(void linear_cross_entropy_forward(const Stream& stream, TensorView loss_sum,
                                               ConstTensorView hidden, ConstTensorView weight,
                                               ConstTensorView targets,
                                               const CrossEntropyOptions& options);
             void linear_cross_entropy_train(const Stream& stream, TensorView loss_sum,
                                             TensorView grad_hidden, TensorView grad_weight,
                                             ConstTensorView hidden, ConstTensorView weight,
                                             ConstTensorView targets,
                                             const CrossEntropyOptions& options);)

namespace {

void check_rows(const ConstTensorView& x, const Stream& stream, int64_t rows, int64_t columns,
                const char* name) {
  MUSTER_CHECK(x.rank() == 2 && x.size(0) == rows && x.size(1) == columns,
               std::string(name) + " " + x.shape().to_string() + ", expected " +
                   Shape{rows, columns}.to_string());
  MUSTER_CHECK((columns <= 1 || x.stride(1) == 1) && (rows <= 1 || x.stride(0) >= columns), name);
  MUSTER_CHECK(x.device() == stream.device, name);
}

void check_inputs(const Stream& stream, const ConstTensorView& loss_sum,
                  const ConstTensorView& hidden, const ConstTensorView& weight,
                  const ConstTensorView& targets, const CrossEntropyOptions& options) {
  MUSTER_CHECK(loss_sum.numel() == 1 && loss_sum.dtype() == DType::kFloat64 &&
               loss_sum.device() == stream.device);
  MUSTER_CHECK(hidden.rank() == 2 && weight.rank() == 2 && weight.size(0) > 0);
  check_rows(hidden, stream, hidden.size(0), hidden.size(1), "hidden");
  check_rows(weight, stream, weight.size(0), hidden.size(1), "weight");
  MUSTER_CHECK(hidden.dtype() == weight.dtype());
  MUSTER_CHECK(targets.rank() == 1 && targets.size(0) == hidden.size(0) && targets.contiguous() &&
                   targets.dtype() == DType::kInt32 && targets.device() == stream.device,
               "targets " + targets.shape().to_string());
  MUSTER_CHECK(options.workspace_bytes >= kMinCrossEntropyWorkspace);
}

}  // namespace

void linear_cross_entropy_forward(const Stream& stream, TensorView loss_sum, ConstTensorView hidden,
                                  ConstTensorView weight, ConstTensorView targets,
                                  const CrossEntropyOptions& options) {
  check_inputs(stream, loss_sum, hidden, weight, targets, options);
  MUSTER_DISPATCH(stream,
                  linear_cross_entropy_forward(stream, loss_sum, hidden, weight, targets, options));
}

void linear_cross_entropy_train(const Stream& stream, TensorView loss_sum, TensorView grad_hidden,
                                TensorView grad_weight, ConstTensorView hidden,
                                ConstTensorView weight, ConstTensorView targets,
                                const CrossEntropyOptions& options) {
  check_inputs(stream, loss_sum, hidden, weight, targets, options);
  check_rows(grad_hidden, stream, hidden.size(0), hidden.size(1), "grad_hidden");
  check_rows(grad_weight, stream, weight.size(0), weight.size(1), "grad_weight");
  MUSTER_CHECK(grad_hidden.dtype() == hidden.dtype() && grad_weight.dtype() == DType::kFloat32);
  MUSTER_DISPATCH(stream, linear_cross_entropy_train(stream, loss_sum, grad_hidden, grad_weight,
                                                     hidden, weight, targets, options));
}

}  // namespace muster
