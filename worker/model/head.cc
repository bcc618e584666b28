#include "worker/model/head.h"

#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/matmul/matmul.h"
#include "kernels/runtime/runtime.h"
#include "worker/model/embedding.h"
#include "worker/model/linear.h"

namespace muster {

Head::Head(UnitSpec& unit, const ModelConfig& config)
    : norm_(unit, unit.name + ".norm", config), tied_(config.tie_embeddings) {
  if (!tied_) {
    weight_ = add_parameter(unit, unit.name + ".weight", {config.vocab_size, config.width},
                            Init::kNormal, config.init_std, /*written_first=*/true);
  }
}

ConstTensorView Head::matrix(const UnitWeights& weights, const UnitWeights& embedding) const {
  return tied_ ? embedding[Embedding::kTokens] : weights[weight_];
}

void Head::loss(const Pass& pass, TensorView loss_sum, ConstTensorView x,
                const UnitWeights& weights, ConstTensorView matrix) const {
  Norm::Saved saved;
  const Tensor hidden = norm_.forward(pass, x, weights, saved);
  linear_cross_entropy_forward(pass.stream(), loss_sum, hidden, matrix, pass.batch.targets,
                               {.ignore_index = kIgnoredTarget});
}

Tensor Head::train(const Pass& pass, TensorView loss_sum, ConstTensorView x,
                   const UnitWeights& weights, ConstTensorView matrix,
                   const UnitGradients& gradients, const UnitGradients& embedding) const {
  Norm::Saved saved;
  const Tensor hidden = norm_.forward(pass, x, weights, saved);
  Tensor grad_x = pass.activation(hidden.shape());
  const TensorView matrix_gradient = tied_ ? embedding[Embedding::kTokens] : gradients[weight_];
  const bool fresh = tied_ ? embedding.fresh : gradients.fresh;
  linear_cross_entropy_train(pass.stream(), loss_sum, grad_x, matrix_gradient, hidden, matrix,
                             pass.batch.targets,
                             {.ignore_index = kIgnoredTarget, .accumulate_weight = !fresh});
  norm_.backward(pass, grad_x, grad_x, x, saved, weights, gradients, /*accumulate=*/false);
  return grad_x;
}

std::vector<float> Head::last_logits(const Pass& pass, ConstTensorView x,
                                     const UnitWeights& weights, ConstTensorView matrix) const {
  Norm::Saved saved;
  const Tensor hidden = norm_.forward(pass, x.slice(x.size(0) - 1, x.size(0)), weights, saved);
  const Tensor logits = pass.activation({1, matrix.size(0)});
  linear_forward(pass.stream(), logits, hidden, matrix);
  const Tensor wide = pass.statistic(logits.shape());
  copy_cast(pass.stream(), wide, logits);
  std::vector<float> values(wide.numel());
  copy(pass.stream(), TensorView(values.data(), DType::kFloat32, wide.shape()), wide);
  synchronize(pass.stream());
  return values;
}

}  // namespace muster
