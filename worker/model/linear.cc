#include "worker/model/linear.h"

#include "kernels/matmul/matmul.h"

namespace muster {

size_t add_parameter(UnitSpec& unit, const std::string& name, Shape shape, Init init,
                     double init_std) {
  ParameterSpec spec;
  spec.name = name;
  spec.shape = shape;
  spec.init = init;
  spec.init_std = init_std;
  spec.decay = shape.rank >= 2;
  unit.parameters.push_back(spec);
  return unit.parameters.size() - 1;
}

Linear::Linear(UnitSpec& unit, const std::string& name, int64_t inputs, int64_t outputs, bool bias,
               double init_std)
    : inputs_(inputs), outputs_(outputs), has_bias_(bias) {
  weight_ = add_parameter(unit, name + ".weight", {outputs, inputs}, Init::kNormal, init_std);
  if (bias) bias_ = add_parameter(unit, name + ".bias", {outputs}, Init::kZeros);
}

Tensor Linear::forward(const Pass& pass, ConstTensorView x, const UnitWeights& weights) const {
  Tensor out = pass.activation({x.size(0), outputs_});
  linear_forward(pass.stream(), out, x, weights[weight_],
                 has_bias_ ? weights[bias_] : ConstTensorView());
  return out;
}

Tensor Linear::backward(const Pass& pass, ConstTensorView grad_out, ConstTensorView x,
                        const UnitWeights& weights, const UnitGradients& gradients) const {
  Tensor grad_x = pass.activation({x.size(0), inputs_});
  linear_backward(pass.stream(), grad_x, gradients[weight_],
                  has_bias_ ? gradients[bias_] : TensorView(), grad_out, x, weights[weight_]);
  return grad_x;
}

}  // namespace muster
