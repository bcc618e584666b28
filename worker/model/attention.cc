#include "worker/model/attention.h"

#include <utility>

#include "kernels/attention/attention.h"
#include "kernels/rmsnorm/rmsnorm.h"
#include "kernels/rope/rope.h"
#include "worker/model/init.h"

namespace muster {
namespace {

Segments segments_of(const Batch& batch) {
  return {batch.cu_seqlens, batch.cu_seqlens, batch.max_segment, batch.max_segment};
}

}  // namespace

Attention::Attention(UnitSpec& unit, const std::string& name, const ModelConfig& config)
    : heads_(config.heads),
      kv_heads_(config.kv_heads),
      head_dim_(config.head_dim),
      causal_(config.causal),
      qk_norm_(config.qk_norm),
      eps_(static_cast<float>(config.norm_eps)),
      qkv_(unit, name + ".qkv", config.width, (heads_ + 2 * kv_heads_) * head_dim_,
           config.family == "gpt2" || config.qkv_bias, config.init_std),
      out_(unit, name + ".out", heads_ * head_dim_, config.width, config.family == "gpt2",
           residual_init_std(config)) {
  if (qk_norm_) {
    q_norm_ = add_parameter(unit, name + ".q_norm.weight", {head_dim_}, Init::kOnes);
    k_norm_ = add_parameter(unit, name + ".k_norm.weight", {head_dim_}, Init::kOnes);
  }
}

Tensor Attention::forward(const Pass& pass, Tensor x, ConstTensorView residual,
                          const UnitWeights& weights, Saved& saved) const {
  const int64_t tokens = x.shape()[0];
  const int64_t qk_heads = heads_ + kv_heads_;
  saved.qkv = qkv_.forward(pass, std::move(x), weights, saved.x);
  const TensorView qkv = saved.qkv.view().reshape({tokens, qk_heads + kv_heads_, head_dim_});
  TensorView qk = qkv.narrow(1, 0, qk_heads);
  if (qk_norm_) {
    normalise(pass, weights, saved);
    qk = saved.qk;
  }
  if (pass.rope.defined()) {
    rope_apply(pass.stream(), qk, pass.rope, pass.batch.positions, /*inverse=*/false);
  }
  if (!saved.out.defined()) {
    saved.out = pass.activation({tokens, heads_ * head_dim_});
    saved.lse = pass.statistic({heads_, tokens});
    attention_forward(pass.stream(), saved.out.view().reshape({tokens, heads_, head_dim_}),
                      saved.lse, qk.narrow(1, 0, heads_), qk.narrow(1, heads_, qk_heads),
                      qkv.narrow(1, qk_heads, qk_heads + kv_heads_), segments_of(pass.batch),
                      options(pass));
  }
  return out_.forward(pass, saved.out, weights, saved.merged, residual);
}

Tensor Attention::backward(const Pass& pass, ConstTensorView grad_out, Saved& saved,
                           const UnitWeights& weights, const UnitGradients& gradients) const {
  const int64_t tokens = grad_out.size(0);
  const int64_t qk_heads = heads_ + kv_heads_;
  const Shape heads{tokens, heads_, head_dim_};
  Tensor grad_heads = out_.backward(pass, grad_out, saved.merged, weights, gradients);

  const Shape merged{tokens, qk_heads + kv_heads_, head_dim_};
  const TensorView qkv = saved.qkv.view().reshape(merged);
  const TensorView qk = qk_norm_ ? saved.qk.view() : qkv.narrow(1, 0, qk_heads);
  Tensor grad_qkv = pass.activation(merged);
  const TensorView grad_qk = grad_qkv.view().narrow(1, 0, qk_heads);
  attention_backward(
      pass.stream(), grad_qk.narrow(1, 0, heads_), grad_qk.narrow(1, heads_, qk_heads),
      grad_qkv.view().narrow(1, qk_heads, qk_heads + kv_heads_), grad_heads.view().reshape(heads),
      qk.narrow(1, 0, heads_), qk.narrow(1, heads_, qk_heads),
      qkv.narrow(1, qk_heads, qk_heads + kv_heads_), saved.out.view().reshape(heads), saved.lse,
      segments_of(pass.batch), options(pass));
  grad_heads = {};
  saved.out = {};
  if (pass.rope.defined()) {
    rope_apply(pass.stream(), grad_qk, pass.rope, pass.batch.positions, /*inverse=*/true);
  }
  if (qk_norm_) normalise_backward(pass, grad_qkv, saved, weights, gradients);
  Linear::Saved x = std::move(saved.x);
  saved = {};
  return qkv_.backward(pass, grad_qkv.view().reshape({tokens, (qk_heads + kv_heads_) * head_dim_}),
                       x, weights, gradients);
}

void Attention::normalise(const Pass& pass, const UnitWeights& weights, Saved& saved) const {
  const int64_t tokens = saved.qkv.shape()[0];
  const int64_t qk_heads = heads_ + kv_heads_;
  const ConstTensorView qkv = saved.qkv.view().reshape({tokens, qk_heads + kv_heads_, head_dim_});
  saved.qk = pass.activation({tokens, qk_heads, head_dim_});
  saved.q_rstd = pass.statistic({tokens, heads_});
  saved.k_rstd = pass.statistic({tokens, kv_heads_});
  rmsnorm_forward(pass.stream(), saved.qk.view().narrow(1, 0, heads_), saved.q_rstd,
                  qkv.narrow(1, 0, heads_), weights[q_norm_], eps_);
  rmsnorm_forward(pass.stream(), saved.qk.view().narrow(1, heads_, qk_heads), saved.k_rstd,
                  qkv.narrow(1, heads_, qk_heads), weights[k_norm_], eps_);
}

void Attention::normalise_backward(const Pass& pass, TensorView grad_qkv, const Saved& saved,
                                   const UnitWeights& weights,
                                   const UnitGradients& gradients) const {
  const int64_t qk_heads = heads_ + kv_heads_;
  const ConstTensorView qkv = saved.qkv.view().reshape(grad_qkv.shape());
  const TensorView grad_q = grad_qkv.narrow(1, 0, heads_);
  const TensorView grad_k = grad_qkv.narrow(1, heads_, qk_heads);
  rmsnorm_backward(pass.stream(), grad_q, gradients[q_norm_], grad_q, qkv.narrow(1, 0, heads_),
                   weights[q_norm_], saved.q_rstd);
  rmsnorm_backward(pass.stream(), grad_k, gradients[k_norm_], grad_k,
                   qkv.narrow(1, heads_, qk_heads), weights[k_norm_], saved.k_rstd);
}

}  // namespace muster
