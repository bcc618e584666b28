// The attention half of a block: merged QKV product, optional QK-norm, RoPE, flash attention over
// the batch's document segments, output product.
#pragma once

#include <string>

#include "common/config/config.h"
#include "kernels/attention/attention.h"
#include "worker/model/linear.h"

namespace muster {

class Attention {
 public:
  // What backward needs. N tokens, H query and K key/value heads of D elements.
  struct Saved {
    Linear::Saved x;  // [N, width], the input
    Tensor qkv;       // [N, H + 2K, D]; queries and keys turned by RoPE, unless qk_norm
    Tensor qk;      // [N, H + K, D], qk_norm only: normalised and turned (qkv then holds the norm's
                    // input)
    Tensor q_rstd;  // [N, H] float32, qk_norm only
    Tensor k_rstd;  // [N, K] float32, qk_norm only
    Tensor out;     // [N, H · D]
    Linear::Saved merged;  // the same, for the output product
    Tensor lse;            // [H, N] float32
  };
  // Adds NAME.qkv.*, NAME.q_norm.weight, NAME.k_norm.weight and NAME.out.* to `unit`.
  Attention(UnitSpec& unit, const std::string& name, const ModelConfig& config);
  // x [N, width] → residual + attention(x), [N, width]. Where `saved` holds out and lse of the same
  // x already, they are not computed again.
  Tensor forward(const Pass& pass, Tensor x, ConstTensorView residual, const UnitWeights& weights,
                 Saved& saved) const;
  // Returns the gradient of x. Uses up `saved`.
  Tensor backward(const Pass& pass, ConstTensorView grad_out, Saved& saved,
                  const UnitWeights& weights, const UnitGradients& gradients) const;

 private:
  AttentionOptions options(const Pass& pass) const {
    return {.causal = causal_, .deterministic = pass.context.deterministic};
  }
  void normalise(const Pass& pass, const UnitWeights& weights, Saved& saved) const;
  void normalise_backward(const Pass& pass, TensorView grad_qkv, const Saved& saved,
                          const UnitWeights& weights, const UnitGradients& gradients) const;

  const int64_t heads_;
  const int64_t kv_heads_;
  const int64_t head_dim_;
  const bool causal_;
  const bool qk_norm_;
  const float eps_;
  Linear qkv_;
  Linear out_;
  size_t q_norm_ = 0;
  size_t k_norm_ = 0;
};

}  // namespace muster
