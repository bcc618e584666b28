// Parameters that lie whole in this process, float32 in host memory: for generation, tests and
// tools.
#pragma once

#include <cstdint>
#include <vector>

#include "worker/model/parameters.h"

namespace muster {

class LocalParameters : public Parameters {
 public:
  // Weights of every unit, zero. Gradients take memory from their first use on.
  explicit LocalParameters(std::vector<UnitSpec> units);

  // Weights from the seed.
  void initialise(uint64_t seed);
  void clear_gradients();

  const std::vector<UnitSpec>& units() const { return units_; }
  // The flat unit [numel] float32: weights, writable, and gradients.
  TensorView flat_weights(int unit) const { return weights_[unit]; }
  TensorView flat_gradients(int unit);

  void begin_pass(std::vector<int> /*use_order*/) override {}
  UnitWeights use(int unit) override;
  void release(int /*unit*/) override {}
  UnitGradients gradients(int unit) override;
  void gradients_done(int /*unit*/) override {}

 private:
  std::vector<UnitSpec> units_;
  std::vector<Tensor> weights_;
  std::vector<Tensor> gradients_;
};

}  // namespace muster
