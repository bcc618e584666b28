// Token embedding, plus learned positions for GPT-2.
#pragma once

#include "common/config/config.h"
#include "worker/model/context.h"
#include "worker/model/parameters.h"

namespace muster {

class Embedding {
 public:
  // Index of the token matrix [vocab_size, width] in the unit; a tied head reads it too.
  static constexpr size_t kTokens = 0;

  // Adds UNIT.tokens.weight and, for GPT-2, UNIT.positions.weight [max_positions, width] to `unit`.
  Embedding(UnitSpec& unit, const ModelConfig& config);
  // → [N, width].
  Tensor forward(const Pass& pass, const UnitWeights& weights) const;
  // grad_out [N, width]. Needs no weights.
  void backward(const Pass& pass, ConstTensorView grad_out, const UnitGradients& gradients) const;

 private:
  const int64_t width_;
  const bool learned_positions_;
  size_t positions_ = 0;
};

}  // namespace muster
