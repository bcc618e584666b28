// A linear layer of a unit, weight [outputs, inputs] and optional bias [outputs].
#pragma once

#include <string>

#include "kernels/fp8/fp8.h"
#include "worker/model/context.h"
#include "worker/model/parameters.h"

namespace muster {

// Adds a parameter to the unit and returns its index there. Matrices decay, everything else does
// not.
size_t add_parameter(UnitSpec& unit, const std::string& name, Shape shape, Init init,
                     double init_std = 0.0, bool written_first = false);

class Linear {
 public:
  // What backward needs of the input: x, or in float8 the copy that the weight's gradient takes.
  struct Saved {
    Tensor x;
    Fp8Operand x8;
  };

  // Adds NAME.weight and NAME.bias to `unit`.
  Linear(UnitSpec& unit, const std::string& name, int64_t inputs, int64_t outputs, bool bias,
         double init_std);
  // x [N, inputs] → [N, outputs], plus `residual` [N, outputs] where it is defined.
  Tensor forward(const Pass& pass, Tensor x, const UnitWeights& weights, Saved& saved,
                 ConstTensorView residual = {}) const;
  // What forward() leaves in `saved`, without the product: of a layer whose output nobody needs
  // again.
  void keep_input(const Pass& pass, Tensor x, Saved& saved) const;
  // Returns the gradient of x; those of weight and bias (unless it is done already) accumulate.
  // Uses up `saved`.
  Tensor backward(const Pass& pass, ConstTensorView grad_out, Saved& saved,
                  const UnitWeights& weights, const UnitGradients& gradients,
                  bool with_bias = true) const;

  // The same layer with a GELU behind or before it, as one with the product.
  // Returns gelu(hidden), hidden = x · weightᵀ + bias.
  Tensor forward_gelu(const Pass& pass, Tensor x, const UnitWeights& weights, Saved& saved,
                      Tensor& hidden) const;
  // For an input x = gelu(hidden), with `before` the layer that made hidden: returns the gradient
  // of hidden; those of this layer's weight and bias and of before's bias accumulate.
  Tensor backward_gelu(const Pass& pass, ConstTensorView grad_out, Saved& saved,
                       ConstTensorView hidden, const Linear& before, const UnitWeights& weights,
                       const UnitGradients& gradients) const;

 private:
  bool in_fp8(const Pass& pass, int64_t tokens) const;
  ConstTensorView bias(const UnitWeights& weights) const {
    return has_bias_ ? weights[bias_] : ConstTensorView();
  }
  TensorView bias_gradient(const UnitGradients& gradients) const {
    return has_bias_ ? gradients[bias_] : TensorView();
  }
  Tensor backward_fp8(const Pass& pass, ConstTensorView grad_out, Saved& saved,
                      const UnitWeights& weights, const UnitGradients& gradients) const;

  int64_t inputs_;
  int64_t outputs_;
  bool has_bias_;
  size_t weight_ = 0;
  size_t bias_ = 0;
};

}  // namespace muster
