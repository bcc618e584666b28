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
  // A matrix product makes the first contribution to its gradient in a pass, and can overwrite:
  // what lies there need not be zero before.
  bool written_first = false;
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

// Where a unit's gradients accumulate: one view per ParameterSpec, float32.
struct UnitGradients {
  std::vector<TensorView> views;
  // Those that are written_first hold anything at all and must be overwritten; the others are zero.
  bool fresh = false;
  const TensorView& operator[](size_t i) const { return views[i]; }
};

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
  // Where the unit's gradients accumulate. Fresh at the first call of an accumulation, or zero.
  virtual UnitGradients gradients(int unit) = 0;
  // This pass adds nothing more to the unit's gradients: they may be reduced over the workers now.
  virtual void gradients_done(int unit) = 0;
};

// Elements [first, first + out.numel()) of a parameter at initialisation, out [n] float32: a pure
// function of (seed, name, element), whoever computes it.
void fill_initial(const Stream& stream, TensorView out, uint64_t seed, const ParameterSpec& spec,
                  int64_t first);

}  // namespace muster
