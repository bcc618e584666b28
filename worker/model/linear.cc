#include "worker/model/linear.h"

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

Tensor Linear::forward(const Pass& pass, ConstTensorView x, const UnitWeights& weights,
                       ConstTensorView residual) const {
  Tensor out = pass.activation({x.size(0), outputs_});
  linear_forward(pass.stream(), out, x, weights[weight_],
                 has_bias_ ? weights[bias_] : ConstTensorView(), residual);
  return out;
}

Tensor Linear::backward(const Pass& pass, ConstTensorView grad_out, ConstTensorView x,
                        const UnitWeights& weights, const UnitGradients& gradients,
                        bool with_bias) const {
  Tensor grad_x = pass.activation({x.size(0), inputs_});
  linear_backward(pass.stream(), grad_x, gradients[weight_],
                  with_bias ? bias_gradient(gradients) : TensorView(), grad_out, x,
                  weights[weight_], /*accumulate_weight=*/!gradients.fresh);
  return grad_x;
}

Tensor Linear::forward_gelu(const Pass& pass, ConstTensorView x, const UnitWeights& weights,
                            Tensor& hidden) const {
  hidden = pass.activation({x.size(0), outputs_});
  Tensor out = pass.activation(hidden.shape());
  linear_gelu_forward(pass.stream(), out, hidden, x, weights[weight_],
                      has_bias_ ? weights[bias_] : ConstTensorView());
  return out;
}

Tensor Linear::backward_gelu(const Pass& pass, ConstTensorView grad_out, ConstTensorView x,
                             Tensor hidden, const Linear& before, const UnitWeights& weights,
                             const UnitGradients& gradients) const {
  linear_backward(pass.stream(), {}, gradients[weight_], bias_gradient(gradients), grad_out, x,
                  weights[weight_], /*accumulate_weight=*/!gradients.fresh);
  linear_gelu_backward(pass.stream(), hidden, before.bias_gradient(gradients), grad_out,
                       weights[weight_], hidden);
  return hidden;
}

}  // namespace muster
