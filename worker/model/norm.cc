#include "worker/model/norm.h"

#include "kernels/layernorm/layernorm.h"
#include "kernels/rmsnorm/rmsnorm.h"
#include "worker/model/linear.h"

namespace muster {

Norm::Norm(UnitSpec& unit, const std::string& name, const ModelConfig& config)
    : layer_norm_(config.family == "gpt2"), eps_(static_cast<float>(config.norm_eps)) {
  weight_ = add_parameter(unit, name + ".weight", {config.width}, Init::kOnes);
  if (layer_norm_) bias_ = add_parameter(unit, name + ".bias", {config.width}, Init::kZeros);
}

Tensor Norm::forward(const Pass& pass, ConstTensorView x, const UnitWeights& weights,
                     Saved& saved) const {
  const int64_t tokens = x.size(0);
  Tensor out = pass.activation({tokens, x.size(1)});
  saved.rstd = pass.statistic({tokens});
  if (layer_norm_) {
    saved.mean = pass.statistic({tokens});
    layernorm_forward(pass.stream(), out, saved.mean, saved.rstd, x, weights[weight_],
                      weights[bias_], eps_);
  } else {
    rmsnorm_forward(pass.stream(), out, saved.rstd, x, weights[weight_], eps_);
  }
  return out;
}

void Norm::backward(const Pass& pass, TensorView grad_x, ConstTensorView grad_out,
                    ConstTensorView x, const Saved& saved, const UnitWeights& weights,
                    const UnitGradients& gradients, bool accumulate) const {
  if (layer_norm_) {
    layernorm_backward(pass.stream(), grad_x, gradients[weight_], gradients[bias_], grad_out, x,
                       weights[weight_], saved.mean, saved.rstd, accumulate);
  } else {
    rmsnorm_backward(pass.stream(), grad_x, gradients[weight_], grad_out, x, weights[weight_],
                     saved.rstd, accumulate);
  }
}

}  // namespace muster
