#include "worker/model/embedding.h"

#include "kernels/elementwise/elementwise.h"
#include "kernels/embedding/embedding.h"
#include "worker/model/linear.h"

namespace muster {

Embedding::Embedding(UnitSpec& unit, const ModelConfig& config)
    : width_(config.width), learned_positions_(config.family == "gpt2") {
  const size_t tokens =
      add_parameter(unit, unit.name + ".tokens.weight", {config.vocab_size, config.width},
                    Init::kNormal, config.init_std, /*written_first=*/config.tie_embeddings);
  MUSTER_CHECK(tokens == kTokens);
  if (learned_positions_) {
    positions_ =
        add_parameter(unit, unit.name + ".positions.weight", {config.max_positions, config.width},
                      Init::kNormal, config.init_std);
  }
}

Tensor Embedding::forward(const Pass& pass, const UnitWeights& weights) const {
  const Shape shape{pass.batch.tokens.size(0), width_};
  Tensor out = pass.activation(shape);
  embedding_forward(pass.stream(), out, weights[kTokens], pass.batch.tokens);
  if (learned_positions_) {
    const Tensor positions = pass.activation(shape);
    embedding_forward(pass.stream(), positions, weights[positions_], pass.batch.positions);
    add(pass.stream(), out, out, positions);
  }
  return out;
}

void Embedding::backward(const Pass& pass, ConstTensorView grad_out,
                         const UnitGradients& gradients) const {
  embedding_backward(pass.stream(), gradients[kTokens], grad_out, pass.batch.tokens);
  if (learned_positions_) {
    embedding_backward(pass.stream(), gradients[positions_], grad_out, pass.batch.positions);
  }
}

}  // namespace muster
