#include "worker/model/linear.h"

#include <utility>

#include "kernels/gelu/gelu.h"
#include "kernels/matmul/matmul.h"

namespace muster {

size_t add_parameter(UnitSpec& unit, const std::string& name, Shape shape, Init init,
                     double init_std, bool written_first) {
  ParameterSpec spec;
  spec.name = name;
  spec.shape = shape;
  spec.init = init;
  spec.init_std = init_std;
  spec.decay = shape.rank >= 2;
  spec.written_first = written_first;
  unit.parameters.push_back(spec);
  return unit.parameters.size() - 1;
}

Linear::Linear(UnitSpec& unit, const std::string& name, int64_t inputs, int64_t outputs, bool bias,
               double init_std)
    : inputs_(inputs), outputs_(outputs), has_bias_(bias) {
  weight_ = add_parameter(unit, name + ".weight", {outputs, inputs}, Init::kNormal, init_std,
                          /*written_first=*/true);
  if (bias) bias_ = add_parameter(unit, name + ".bias", {outputs}, Init::kZeros);
}

bool Linear::in_fp8(const Pass& pass, int64_t tokens) const {
  return pass.context.fp8 && fp8_fits(tokens, outputs_, inputs_);
}

Tensor Linear::forward(const Pass& pass, Tensor x, const UnitWeights& weights, Saved& saved,
                       ConstTensorView residual) const {
  const int64_t tokens = x.shape()[0];
  Tensor out = pass.activation({tokens, outputs_});
  if (!in_fp8(pass, tokens)) {
    linear_forward(pass.stream(), out, x, weights[weight_], bias(weights), residual);
    saved.x = std::move(x);
    return out;
  }
  Allocator& memory = *pass.context.allocator;
  saved.x8 = fp8_quantise(pass.stream(), memory, x, DType::kFloat8E4M3);
  const Fp8Operand weight8 =
      fp8_quantise(pass.stream(), memory, weights[weight_], DType::kFloat8E4M3, Fp8Copies::kData);
  fp8_matmul(pass.stream(), out, saved.x8.by_columns(), weight8.by_columns(),
             {.bias = bias(weights), .addend = residual});
  saved.x8.data = {};
  return out;
}

void Linear::keep_input(const Pass& pass, Tensor x, Saved& saved) const {
  if (in_fp8(pass, x.shape()[0])) {
    saved.x8 = fp8_quantise(pass.stream(), *pass.context.allocator, x, DType::kFloat8E4M3,
                            Fp8Copies::kTransposed);
  } else {
    saved.x = std::move(x);
  }
}

Tensor Linear::backward(const Pass& pass, ConstTensorView grad_out, Saved& saved,
                        const UnitWeights& weights, const UnitGradients& gradients,
                        bool with_bias) const {
  const TensorView grad_bias = with_bias ? bias_gradient(gradients) : TensorView();
  if (in_fp8(pass, grad_out.size(0))) {
    linear_backward(pass.stream(), {}, {}, grad_bias, grad_out, {}, {});
    return backward_fp8(pass, grad_out, saved, weights, gradients);
  }
  Tensor grad_x = pass.activation({grad_out.size(0), inputs_});
  linear_backward(pass.stream(), grad_x, gradients[weight_], grad_bias, grad_out, saved.x,
                  weights[weight_], /*accumulate_weight=*/!gradients.fresh);
  saved = {};
  return grad_x;
}

Tensor Linear::backward_fp8(const Pass& pass, ConstTensorView grad_out, Saved& saved,
                            const UnitWeights& weights, const UnitGradients& gradients) const {
  Allocator& memory = *pass.context.allocator;
  const Fp8Operand grad8 = fp8_quantise(pass.stream(), memory, grad_out, DType::kFloat8E5M2);
  const TensorView grad_weight = gradients[weight_];
  fp8_matmul(pass.stream(), grad_weight, grad8.by_rows(), saved.x8.by_rows(),
             {.addend = gradients.fresh ? ConstTensorView() : grad_weight, .exact_sums = true});
  saved = {};
  const Fp8Operand weight8 = fp8_quantise(pass.stream(), memory, weights[weight_],
                                          DType::kFloat8E4M3, Fp8Copies::kTransposed);
  Tensor grad_x = pass.activation({grad_out.size(0), inputs_});
  fp8_matmul(pass.stream(), grad_x, grad8.by_columns(), weight8.by_rows(), {.exact_sums = true});
  return grad_x;
}

Tensor Linear::forward_gelu(const Pass& pass, Tensor x, const UnitWeights& weights, Saved& saved,
                            Tensor& hidden) const {
  const Shape shape{x.shape()[0], outputs_};
  if (in_fp8(pass, shape[0])) {
    hidden = forward(pass, std::move(x), weights, saved);
    Tensor out = pass.activation(shape);
    gelu_forward(pass.stream(), out, hidden);
    return out;
  }
  hidden = pass.activation(shape);
  Tensor out = pass.activation(shape);
  linear_gelu_forward(pass.stream(), out, hidden, x, weights[weight_], bias(weights));
  saved.x = std::move(x);
  return out;
}

Tensor Linear::backward_gelu(const Pass& pass, ConstTensorView grad_out, Saved& saved,
                             ConstTensorView hidden, const Linear& before,
                             const UnitWeights& weights, const UnitGradients& gradients) const {
  if (in_fp8(pass, grad_out.size(0))) {
    Tensor grad = backward(pass, grad_out, saved, weights, gradients);
    gelu_backward(pass.stream(), grad, grad, hidden);
    linear_backward(pass.stream(), {}, {}, before.bias_gradient(gradients), grad, {}, {});
    return grad;
  }
  linear_backward(pass.stream(), {}, gradients[weight_], bias_gradient(gradients), grad_out,
                  saved.x, weights[weight_], /*accumulate_weight=*/!gradients.fresh);
  saved = {};
  // Not in hidden's place, where it could not be one with the product.
  Tensor grad_hidden = pass.activation(hidden.shape());
  linear_gelu_backward(pass.stream(), grad_hidden, before.bias_gradient(gradients), grad_out,
                       weights[weight_], hidden);
  return grad_hidden;
}

}  // namespace muster
