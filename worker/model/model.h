// A transformer from its config alone: Llama family (RMSNorm, RoPE, grouped-query attention,
// SwiGLU) and GPT-2 family (LayerNorm, learned positions, GELU, biases). Knows no ranks: weights
// come from Parameters.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/config/config.h"
#include "data/batch.h"
#include "worker/model/context.h"
#include "worker/model/parameters.h"

namespace muster {

// Which blocks keep their activations for the backward pass. Segments of `segment` blocks keep only
// their input and are run again in backward, with bitwise the same result; 0 = everything is kept.
// With keep_attention they keep what attention gave too, and it is not run again.
struct CheckpointPolicy {
  int64_t segment = 0;
  bool keep_attention = false;
  // "none" → 0, "block" → 1, "selective" → 1 with keep_attention, "every:N" → N. Throws
  // ConfigError.
  static CheckpointPolicy parse(const std::string& text);
};

class Model {
 public:
  // `config` is resolved (resolve_model). `max_positions`: longest sample, for the RoPE table.
  Model(const ModelConfig& config, int64_t max_positions, const ComputeContext& context);
  ~Model();

  const ModelConfig& config() const;
  // Embedding first, blocks, head last. With tied embeddings the head has no matrix and uses the
  // embedding's.
  const std::vector<UnitSpec>& units() const;
  int64_t parameter_count() const;
  // FLOP of training on one token of a sample of `length` tokens, nothing recomputed: six a
  // parameter that multiplies (the embedding's only where the head uses it too) and those of causal
  // attention, whose forward takes 2 · length a channel and layer.
  double training_flop(int64_t length) const;

  // Adds the losses (nats) of the batch's counted targets to loss_sum [1] float64, and the
  // gradients of their sum to `parameters`. The batch, loss_sum and the weights lie on the
  // context's device.
  void forward_backward(Parameters& parameters, const Batch& batch, const CheckpointPolicy& policy,
                        TensorView loss_sum) const;
  // The same loss without gradients; bitwise that of forward_backward.
  void forward(Parameters& parameters, const Batch& batch, TensorView loss_sum) const;
  // Logits [V] float32 of the token that follows `tokens` (at least one, at most max_positions).
  std::vector<float> next_token_logits(Parameters& parameters,
                                       const std::vector<int32_t>& tokens) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
