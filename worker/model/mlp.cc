#include "worker/model/mlp.h"

#include <utility>

#include "kernels/gelu/gelu.h"
#include "kernels/swiglu/swiglu.h"
#include "worker/model/init.h"

namespace muster {

Mlp::Mlp(UnitSpec& unit, const std::string& name, const ModelConfig& config)
    : gated_(config.family == "llama"),
      ffn_(config.ffn),
      up_(unit, name + (gated_ ? ".gate_up" : ".up"), config.width, gated_ ? 2 * ffn_ : ffn_,
          !gated_, config.init_std),
      down_(unit, name + ".down", ffn_, config.width, !gated_, residual_init_std(config)) {}

Tensor Mlp::forward(const Pass& pass, Tensor x, const UnitWeights& weights, Saved& saved) const {
  saved.x = std::move(x);
  saved.hidden = up_.forward(pass, saved.x, weights);
  saved.activated = pass.activation({saved.x.shape()[0], ffn_});
  if (gated_) {
    swiglu_forward(pass.stream(), saved.activated, saved.hidden);
  } else {
    gelu_forward(pass.stream(), saved.activated, saved.hidden);
  }
  return down_.forward(pass, saved.activated, weights);
}

Tensor Mlp::backward(const Pass& pass, ConstTensorView grad_out, Saved& saved,
                     const UnitWeights& weights, const UnitGradients& gradients) const {
  Tensor grad = down_.backward(pass, grad_out, saved.activated, weights, gradients);
  saved.activated = {};
  if (gated_) {
    swiglu_backward(pass.stream(), saved.hidden, grad, saved.hidden);
    grad = std::move(saved.hidden);
  } else {
    gelu_backward(pass.stream(), grad, grad, saved.hidden);
  }
  const Tensor x = std::move(saved.x);
  saved = {};
  return up_.backward(pass, grad, x, weights, gradients);
}

}  // namespace muster
