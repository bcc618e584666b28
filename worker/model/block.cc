#include "worker/model/block.h"

#include <utility>

namespace muster {

TransformerBlock::TransformerBlock(UnitSpec& unit, const ModelConfig& config)
    : attention_norm_(unit, unit.name + ".attention_norm", config),
      attention_(unit, unit.name + ".attention", config),
      mlp_norm_(unit, unit.name + ".mlp_norm", config),
      mlp_(unit, unit.name + ".mlp", config) {}

void TransformerBlock::Saved::drop(bool keep_attention) {
  Saved kept;
  if (keep_attention) {
    kept.attention.out = std::move(attention.out);
    kept.attention.lse = std::move(attention.lse);
  }
  *this = std::move(kept);
}

Tensor TransformerBlock::forward_middle(const Pass& pass, Tensor x, const UnitWeights& weights,
                                        Saved& saved) const {
  saved.x = std::move(x);
  saved.middle = attention_.forward(
      pass, attention_norm_.forward(pass, saved.x, weights, saved.attention_norm), saved.x, weights,
      saved.attention);
  return mlp_norm_.forward(pass, saved.middle, weights, saved.mlp_norm);
}

Tensor TransformerBlock::forward(const Pass& pass, Tensor x, const UnitWeights& weights,
                                 Saved& saved) const {
  Tensor normed = forward_middle(pass, std::move(x), weights, saved);
  return mlp_.forward(pass, std::move(normed), saved.middle, weights, saved.mlp);
}

void TransformerBlock::recompute(const Pass& pass, Tensor x, const UnitWeights& weights,
                                 Saved& saved) const {
  Tensor normed = forward_middle(pass, std::move(x), weights, saved);
  mlp_.forward(pass, std::move(normed), /*residual=*/{}, weights, saved.mlp);
}

void TransformerBlock::backward(const Pass& pass, TensorView grad, Saved& saved,
                                const UnitWeights& weights, const UnitGradients& gradients) const {
  // The residual connection passes `grad` on unchanged; each half adds its own part in place.
  Tensor grad_half = mlp_.backward(pass, grad, saved.mlp, weights, gradients);
  mlp_norm_.backward(pass, grad, grad_half, saved.middle, saved.mlp_norm, weights, gradients,
                     /*accumulate=*/true);
  grad_half = {};
  saved.middle = {};
  grad_half = attention_.backward(pass, grad, saved.attention, weights, gradients);
  attention_norm_.backward(pass, grad, grad_half, saved.x, saved.attention_norm, weights, gradients,
                           /*accumulate=*/true);
  saved = {};
}

}  // namespace muster
