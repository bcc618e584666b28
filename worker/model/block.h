// A pre-norm transformer block of either family: x += attention(norm(x)); x += mlp(norm(x)).
#pragma once

#include <string>

#include "worker/model/attention.h"
#include "worker/model/mlp.h"
#include "worker/model/norm.h"

namespace muster {

class TransformerBlock {
 public:
  // Everything that backward needs.
  struct Saved {
    Tensor x;       // [N, width], the block's input
    Tensor middle;  // [N, width], between attention and MLP
    Norm::Saved attention_norm;
    Norm::Saved mlp_norm;
    Attention::Saved attention;
    Mlp::Saved mlp;
    // Drops what recompute() makes again: everything, or all but what attention gave.
    void drop(bool keep_attention);
  };
  // Adds the block's parameters, named UNIT.NAME.…, to `unit`.
  TransformerBlock(UnitSpec& unit, const ModelConfig& config);
  // x [N, width] → [N, width]. x itself is kept, not changed.
  Tensor forward(const Pass& pass, Tensor x, const UnitWeights& weights, Saved& saved) const;
  // Makes `saved` again for the same x after drop(), without the output.
  void recompute(const Pass& pass, Tensor x, const UnitWeights& weights, Saved& saved) const;
  // `grad` [N, width] is the gradient of the output and becomes the gradient of the input. Uses up
  // `saved`: each activation is freed as soon as nothing more needs it.
  void backward(const Pass& pass, TensorView grad, Saved& saved, const UnitWeights& weights,
                const UnitGradients& gradients) const;

 private:
  // The part of forward before the last residual. Returns the MLP's input.
  Tensor forward_middle(const Pass& pass, Tensor x, const UnitWeights& weights, Saved& saved) const;

  Norm attention_norm_;
  Attention attention_;
  Norm mlp_norm_;
  Mlp mlp_;
};

}  // namespace muster
