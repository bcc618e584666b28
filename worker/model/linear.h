// A linear layer of a unit, weight [outputs, inputs] and optional bias [outputs].
#pragma once

#include <string>

#include "worker/model/context.h"
#include "worker/model/parameters.h"

namespace muster {

// Adds a parameter to the unit and returns its index there. Matrices decay, everything else does
// not.
size_t add_parameter(UnitSpec& unit, const std::string& name, Shape shape, Init init,
                     double init_std = 0.0);

class Linear {
 public:
  // Adds NAME.weight and NAME.bias to `unit`.
  Linear(UnitSpec& unit, const std::string& name, int64_t inputs, int64_t outputs, bool bias,
         double init_std);
  // x [N, inputs] → [N, outputs].
  Tensor forward(const Pass& pass, ConstTensorView x, const UnitWeights& weights) const;
  // Returns the gradient of x; those of weight and bias accumulate.
  Tensor backward(const Pass& pass, ConstTensorView grad_out, ConstTensorView x,
                  const UnitWeights& weights, const UnitGradients& gradients) const;

 private:
  int64_t inputs_;
  int64_t outputs_;
  bool has_bias_;
  size_t weight_ = 0;
  size_t bias_ = 0;
};

}  // namespace muster
