// Small models and batches for the tests of everything that runs a model.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "common/config/config.h"
#include "common/rng.h"
#include "data/batch.h"
#include "worker/model/model.h"

namespace muster::testing {

// A resolved config of odd sizes, so that nothing divides anything.
inline ModelConfig tiny_model(const std::string& family) {
  ModelConfig config;
  config.family = family;
  config.vocab_size = 37;
  config.width = 24;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = family == "llama" ? 2 : 4;
  config.head_dim = 6;
  config.ffn = 20;
  config.max_positions = family == "llama" ? 0 : 16;
  config.init_std = 0.2;  // large enough that attention is far from uniform
  return config;
}

// The loss of a batch on the CPU, without or with gradients.
inline double loss_of(const Model& model, Parameters& parameters, const Batch& batch) {
  const Tensor loss = Tensor::zeros({1}, DType::kFloat64);
  model.forward(parameters, batch, loss);
  return *loss.data<double>();
}
inline double train_on(const Model& model, Parameters& parameters, const Batch& batch,
                       const CheckpointPolicy& policy = {}) {
  const Tensor loss = Tensor::zeros({1}, DType::kFloat64);
  model.forward_backward(parameters, batch, policy, loss);
  return *loss.data<double>();
}

// A batch and the memory behind it. Random tokens; each sample is packed from documents of random
// length, whose last token has no target.
class RandomBatch {
 public:
  RandomBatch(uint64_t seed, int64_t samples, int64_t sequence_length, int64_t vocab_size) {
    const CounterRng rng(seed, RandomPurpose::kSampleOrder, 0);
    uint64_t draws = 0;
    for (int64_t sample = 0; sample < samples; ++sample) {
      for (int64_t left = sequence_length; left > 0;) {
        const int64_t length = 1 + static_cast<int64_t>(rng.bits(draws++) % left);
        add_document(length, [&] { return static_cast<int32_t>(rng.bits(draws++) % vocab_size); });
        left -= length;
      }
      ids_.push_back(sample);
    }
    samples_ = samples;
  }

  Batch batch() const {
    const auto n = static_cast<int64_t>(tokens.size());
    Batch batch;
    batch.samples = samples_;
    batch.sequence_length = n / samples_;
    batch.tokens = ConstTensorView(tokens.data(), DType::kInt32, {n});
    batch.targets = ConstTensorView(targets.data(), DType::kInt32, {n});
    batch.positions = ConstTensorView(positions.data(), DType::kInt32, {n});
    batch.cu_seqlens = ConstTensorView(cu_seqlens.data(), DType::kInt32,
                                       {static_cast<int64_t>(cu_seqlens.size())});
    for (size_t i = 1; i < cu_seqlens.size(); ++i) {
      batch.max_segment = std::max<int64_t>(batch.max_segment, cu_seqlens[i] - cu_seqlens[i - 1]);
    }
    batch.target_tokens = n - std::count(targets.begin(), targets.end(), kIgnoredTarget);
    batch.ids = ids_;
    return batch;
  }

  std::vector<int32_t> tokens, targets, positions;
  std::vector<int32_t> cu_seqlens = {0};

 private:
  template <typename NextToken>
  void add_document(int64_t length, NextToken next_token) {
    for (int64_t i = 0; i < length; ++i) {
      if (i > 0) targets.push_back(tokens.emplace_back(next_token()));
      if (i == 0) tokens.push_back(next_token());
      positions.push_back(static_cast<int32_t>(i));
    }
    targets.push_back(kIgnoredTarget);
    cu_seqlens.push_back(static_cast<int32_t>(tokens.size()));
  }

  int64_t samples_ = 0;
  std::vector<int64_t> ids_;
};

}  // namespace muster::testing
