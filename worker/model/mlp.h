// The feed-forward half of a block: SwiGLU on a merged gate/up product (Llama), or GELU with biases
// (GPT-2).
#pragma once

#include <string>

#include "common/config/config.h"
#include "worker/model/linear.h"

namespace muster {

class Mlp {
 public:
  // What backward needs; F = ffn.
  struct Saved {
    Linear::Saved x;          // [N, width], the input
    Tensor hidden;            // [N, 2F] gate and up, or [N, F]: the activation's input
    Linear::Saved activated;  // [N, F]
  };
  // Adds NAME.gate_up.weight or NAME.up.*, and NAME.down.*, to `unit`.
  Mlp(UnitSpec& unit, const std::string& name, const ModelConfig& config);
  // x [N, width] → residual + mlp(x), [N, width]. Without a residual only `saved` is made, and
  // nothing is returned.
  Tensor forward(const Pass& pass, Tensor x, ConstTensorView residual, const UnitWeights& weights,
                 Saved& saved) const;
  // Returns the gradient of x. Uses up `saved`.
  Tensor backward(const Pass& pass, ConstTensorView grad_out, Saved& saved,
                  const UnitWeights& weights, const UnitGradients& gradients) const;

 private:
  const bool gated_;
  const int64_t ffn_;
  Linear up_;
  Linear down_;
};

}  // namespace muster
