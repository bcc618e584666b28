// The last norm, the projection to the vocabulary and the loss. With tied embeddings the matrix is
// the embedding's.
#pragma once

#include <vector>

#include "common/config/config.h"
#include "worker/model/norm.h"

namespace muster {

class Head {
 public:
  // Adds UNIT.norm.* and, unless tied, UNIT.weight [vocab_size, width] to `unit`.
  Head(UnitSpec& unit, const ModelConfig& config);
  // The projection among this unit's weights, or the token embedding's when tied.
  ConstTensorView matrix(const UnitWeights& weights, const UnitWeights& embedding) const;

  // Adds the losses of the batch's targets to loss_sum [1] float64. x [N, width].
  void loss(const Pass& pass, TensorView loss_sum, ConstTensorView x, const UnitWeights& weights,
            ConstTensorView matrix) const;
  // The same, and returns the gradient of x [N, width]. `embedding` holds the gradients of the
  // embedding's unit when tied.
  Tensor train(const Pass& pass, TensorView loss_sum, ConstTensorView x, const UnitWeights& weights,
               ConstTensorView matrix, const UnitGradients& gradients,
               const UnitGradients& embedding) const;
  // Logits [vocab_size] of the last row of x.
  std::vector<float> last_logits(const Pass& pass, ConstTensorView x, const UnitWeights& weights,
                                 ConstTensorView matrix) const;

 private:
  Norm norm_;
  const bool tied_;
  size_t weight_ = 0;
};

}  // namespace muster
