// The normalisation of a family: RMSNorm (Llama) or LayerNorm (GPT-2).
#pragma once

#include <string>

#include "common/config/config.h"
#include "worker/model/context.h"
#include "worker/model/parameters.h"

namespace muster {

class Norm {
 public:
  // Statistics of the forward pass, [N] float32.
  struct Saved {
    Tensor mean;  // LayerNorm only
    Tensor rstd;
  };
  // Adds NAME.weight, and NAME.bias for LayerNorm, to `unit`.
  Norm(UnitSpec& unit, const std::string& name, const ModelConfig& config);
  // x [N, width] → [N, width].
  Tensor forward(const Pass& pass, ConstTensorView x, const UnitWeights& weights,
                 Saved& saved) const;
  // Adds the gradient of x to grad_x, or overwrites it unless `accumulate`; x is the forward's
  // input.
  void backward(const Pass& pass, TensorView grad_x, ConstTensorView grad_out, ConstTensorView x,
                const Saved& saved, const UnitWeights& weights, const UnitGradients& gradients,
                bool accumulate) const;

 private:
  bool layer_norm_;
  float eps_;
  size_t weight_ = 0;
  size_t bias_ = 0;
};

}  // namespace muster
