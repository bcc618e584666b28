#include "worker/model/mlp.h"

#include <utility>

#include "kernels/swiglu/swiglu.h"
#include "worker/model/init.h"

namespace muster {

Mlp::Mlp(UnitSpec& unit, const std::string& name, const ModelConfig& config)
    : gated_(config.family == "llama"),
      ffn_(config.ffn),
      up_(unit, name + (gated_ ? ".gate_up" : ".up"), config.width, gated_ ? 2 * ffn_ : ffn_,
          !gated_, config.init_std),
      down_(unit, name + ".down", ffn_, config.width, !gated_, residual_init_std(config)) {}

Tensor Mlp::forward(const Pass& pass, Tensor x, ConstTensorView residual,
                    const UnitWeights& weights, Saved& saved) const {
  const int64_t tokens = x.shape()[0];
  Tensor activated;
  if (gated_) {
    saved.hidden = up_.forward(pass, std::move(x), weights, saved.x);
    activated = pass.activation({tokens, ffn_});
    swiglu_forward(pass.stream(), activated, saved.hidden);
  } else {
    activated = up_.forward_gelu(pass, std::move(x), weights, saved.x, saved.hidden);
  }
  if (!residual.defined()) {
    down_.keep_input(pass, std::move(activated), saved.activated);
    return {};
  }
  return down_.forward(pass, std::move(activated), weights, saved.activated, residual);
}

Tensor Mlp::backward(const Pass& pass, ConstTensorView grad_out, Saved& saved,
                     const UnitWeights& weights, const UnitGradients& gradients) const {
  Tensor grad_hidden;
  if (gated_) {
    const Tensor grad = down_.backward(pass, grad_out, saved.activated, weights, gradients);
    swiglu_backward(pass.stream(), saved.hidden, grad, saved.hidden);
    grad_hidden = std::move(saved.hidden);
  } else {
    grad_hidden =
        down_.backward_gelu(pass, grad_out, saved.activated, saved.hidden, up_, weights, gradients);
  }
  Linear::Saved x = std::move(saved.x);
  saved = {};
  return up_.backward(pass, grad_hidden, x, weights, gradients, /*with_bias=*/gated_);
}

}  // namespace muster
