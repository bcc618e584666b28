#include "worker/model/head.h"

#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/matmul/matmul.h"
#include "worker/model/embedding.h"
#include "worker/model/linear.h"

namespace muster {
namespace {

Tensor zero_loss(const Pass& pass) {
  Tensor loss({1}, DType::kFloat64, *pass.context.allocator);
  fill_zero(pass.stream(), loss);
  return loss;
}

}  // namespace

Head::Head(UnitSpec& unit, const ModelConfig& config)
    : norm_(unit, unit.name + ".norm", config), tied_(config.tie_embeddings) {
  if (!tied_) {
    weight_ = add_parameter(unit, unit.name + ".weight", {config.vocab_size, config.width},
                            Init::kNormal, config.init_std);
  }
}

ConstTensorView Head::matrix(const UnitWeights& weights, const UnitWeights& embedding) const {
  return tied_ ? embedding[Embedding::kTokens] : weights[weight_];
}

TensorView Head::matrix_gradient(const UnitGradients& gradients,
                                 const UnitGradients& embedding) const {
  return tied_ ? embedding[Embedding::kTokens] : gradients[weight_];
}

double Head::loss(const Pass& pass, ConstTensorView x, const UnitWeights& weights,
                  ConstTensorView matrix) const {
  Norm::Saved saved;
  const Tensor hidden = norm_.forward(pass, x, weights, saved);
  const Tensor loss = zero_loss(pass);
  linear_cross_entropy_forward(pass.stream(), loss, hidden, matrix, pass.batch.targets,
                               {.ignore_index = kIgnoredTarget});
  return *loss.data<double>();
}

double Head::train(const Pass& pass, ConstTensorView x, const UnitWeights& weights,
                   ConstTensorView matrix, const UnitGradients& gradients,
                   TensorView matrix_gradient, Tensor& grad_x) const {
  Norm::Saved saved;
  const Tensor hidden = norm_.forward(pass, x, weights, saved);
  const Tensor loss = zero_loss(pass);
  grad_x = pass.activation(hidden.shape());
  linear_cross_entropy_train(pass.stream(), loss, grad_x, matrix_gradient, hidden, matrix,
                             pass.batch.targets, {.ignore_index = kIgnoredTarget});
  norm_.backward(pass, grad_x, grad_x, x, saved, weights, gradients, /*accumulate=*/false);
  return *loss.data<double>();
}

std::vector<float> Head::last_logits(const Pass& pass, ConstTensorView x,
                                     const UnitWeights& weights, ConstTensorView matrix) const {
  Norm::Saved saved;
  const Tensor hidden = norm_.forward(pass, x.slice(x.size(0) - 1, x.size(0)), weights, saved);
  const Tensor logits = pass.activation({1, matrix.size(0)});
  linear_forward(pass.stream(), logits, hidden, matrix);
  const Tensor wide = pass.statistic(logits.shape());
  copy_cast(pass.stream(), wide, logits);
  return {wide.data<float>(), wide.data<float>() + wide.numel()};
}

}  // namespace muster
