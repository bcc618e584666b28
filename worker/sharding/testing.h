// A model small enough to be checked by hand, over units that divide by nothing. Sample s pulls
// weight i of every unit towards target(s, i): loss = Σ ½ (w − target)², gradient = w − target.
// The first unit is used again at the end, as a tied embedding is.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "worker/comm/communicator.h"
#include "worker/sharding/sharded_parameters.h"

namespace muster::testing {

// Sizes 17, 1, 30 and 2: at three ranks some own nothing of some units.
inline std::vector<UnitSpec> toy_units() {
  return {{"embedding",
           {{"embedding.tokens", {3, 5}, Init::kNormal, 0.5, true},
            {"embedding.bias", {2}, Init::kZeros, 0.0, false}}},
          {"blocks.0", {{"blocks.0.scale", {1}, Init::kOnes, 0.0, false}}},
          {"blocks.1",
           {{"blocks.1.norm", {6}, Init::kOnes, 0.0, false},
            {"blocks.1.weight", {4, 6}, Init::kNormal, 0.3, true}}},
          {"head", {{"head.norm", {2}, Init::kOnes, 0.0, false}}}};
}

inline float toy_target(int64_t sample, int64_t i) {
  return std::sin(0.7f * static_cast<float>(sample) + 0.3f * static_cast<float>(i));
}

// Adds the gradients of one sample (none if negative) and returns its loss.
inline double toy_pass(Parameters& parameters, int64_t sample) {
  const std::vector<int> order = {0, 1, 2, 3, 0, 2, 1};
  parameters.begin_pass(order);
  double loss = 0.0;
  const auto visit = [&](int unit, bool gradients, bool done) {
    const UnitWeights weights = parameters.use(unit);
    const UnitGradients grads = gradients ? parameters.gradients(unit) : UnitGradients();
    int64_t at = 0;
    for (size_t p = 0; p < weights.size(); ++p) {
      for (int64_t i = 0; i < weights[p].numel(); ++i, ++at) {
        if (sample < 0) continue;
        const float away = weights[p].data<float>()[i] - toy_target(sample, at);
        loss += 0.5 * away * away;
        if (gradients) grads[p].data<float>()[i] += away;
      }
    }
    parameters.release(unit);
    if (done) parameters.gradients_done(unit);
  };
  visit(0, false, false);
  visit(1, false, false);
  visit(2, false, false);
  visit(3, true, true);
  visit(0, true, false);  // the head's use of a tied matrix
  visit(2, true, true);
  visit(1, true, true);
  parameters.gradients(0);  // the embedding's own backward needs no weights
  parameters.gradients_done(0);
  return loss;
}

// The figures of steps on the CPU: what passes add up, and what the update decided.
class HostStep {
 public:
  void begin() { std::fill_n(sums_.data<double>(), 3, 0.0); }
  TensorView loss_sum() const { return sums_.view().slice(1, 2); }
  void add(double loss, double tokens) {
    sums_.data<double>()[1] += loss;
    sums_.data<double>()[2] += tokens;
  }
  // The decision, the same on every rank.
  StepControl update(ShardedParameters& parameters, const OptimizerConfig& optimizer, double lr) {
    parameters.update(optimizer,
                      {.lr = lr,
                       .beta1 = optimizer.beta1,
                       .beta2 = optimizer.beta2,
                       .clip_norm = optimizer.clip_norm},
                      /*rounding_seed=*/0, sums_, control_);
    StepControl control;
    std::memcpy(&control, control_.view().raw(), sizeof(control));
    return control;
  }

 private:
  Tensor sums_ = Tensor::zeros({3}, DType::kFloat64);
  Tensor control_ = Tensor::zeros({sizeof(StepControl)}, DType::kUInt8);
};

}  // namespace muster::testing
