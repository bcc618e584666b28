// How model code reaches weights and gradients without knowing where they live. A model is a list
// of units (embedding, blocks, head); a unit's weights may be sharded over many workers and exist
// in full only while in use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/tensor.h"

namespace muster {

enum class Init : uint8_t { kNormal, kZeros, kOnes };

struct ParameterSpec {
  std::string name;  // global and stable: "blocks.0.attention.qkv.weight"
  Shape shape;
  Init init = Init::kNormal;
  double init_std = 0.0;  // of kNormal
  bool decay = false;     // weight decay applies (matrices only)
};

// Parameters that are gathered, freed and reduced together, laid flat in this order without gaps.
struct UnitSpec {
  std::string name;  // "embedding", "blocks.0", …, "head"
  std::vector<ParameterSpec> parameters;
  int64_t numel() const;
  // Index of the first element of parameter i in the flat unit.
  int64_t offset(size_t i) const;
};

using UnitWeights = std::vector<ConstTensorView>;  // one per ParameterSpec, compute dtype
using UnitGradients =
    std::vector<TensorView>;  // one per ParameterSpec, float32, to accumulate into

// Implemented by LocalParameters (whole, in this process) and ShardedParameters (FSDP).
class Parameters {
 public:
  virtual ~Parameters() = default;
  // A pass over the model begins that will use units in exactly this order (a unit may come several
  // times); the implementation gathers ahead along it.
  virtual void begin_pass(std::vector<int> use_order) = 0;
  // Weights of a unit, complete and readable until release(). Waits for the gather.
  virtual UnitWeights use(int unit) = 0;
  virtual void release(int unit) = 0;
  // Where the unit's gradients accumulate; zero at the first call of an accumulation.
  virtual UnitGradients gradients(int unit) = 0;
  // This pass adds nothing more to the unit's gradients: they may be reduced over the workers now.
  virtual void gradients_done(int unit) = 0;
};

// Element `i` of parameter `spec` at initialisation: a pure function of (seed, name, i), whoever
// computes it.
float initial_value(uint64_t seed, const ParameterSpec& spec, int64_t i);

}  // namespace muster
