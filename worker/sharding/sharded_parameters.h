// FSDP / ZeRO: the training state of one worker, and the Parameters that the model sees.
//
//   parallel.shard   weights                          gradients, float32            masters, m, v
//   full             gathered per use, freed after    reduce-scattered every pass   1/W
//   grad             gathered once a step, kept       reduce-scattered every pass   1/W
//   optimizer        gathered once a step, kept       summed here, then once        1/W
//   none             whole everywhere                 summed here, all-reduced      whole
//
// W is the world, unless parallel.shard_group makes shard groups of G ranks (Groups): then each
// group holds everything, 1/G a rank, as if it were alone; gradients are summed over the replicas
// too, and equal updates of equal state keep the replicas equal, bit for bit. "none" is G = 1.
// Weights are used in the compute dtype; where they are whole everywhere and that is not float32, a
// copy is kept beside the masters.
// Every rank makes the same passes over the same units: also one that has fewer samples (it adds
// zero gradients). With one rank every mode is "none": weights are used where they lie.
// An instance must not outlive its communicators; whoever gives up in mid-step aborts that first,
// or the destructor waits for collectives that no peer may join.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/config/config.h"
#include "kernels/step_control/step_control.h"
#include "worker/comm/groups.h"
#include "worker/model/model.h"
#include "worker/sharding/layout.h"

namespace muster {

// One unit's owned elements of one kind of state.
struct ShardState {
  int unit = 0;
  Range range;        // which elements of the flat unit
  TensorView weight;  // [range.size()] float32
  TensorView m;       // float32 or bfloat16
  TensorView v;
};

struct ShardingOptions {
  std::string mode = "full";              // parallel.shard
  int64_t prefetch_units = 1;             // parallel.prefetch_units
  DType reduce_dtype = DType::kFloat32;   // parallel.reduce_dtype
  DType moments_dtype = DType::kFloat32;  // precision.moments
};

class ShardedParameters : public Parameters {
 public:
  // Allocates everything that lasts; weights are undefined until initialise() or a load through
  // state().
  ShardedParameters(std::vector<UnitSpec> units, const Groups& groups,
                    const ShardingOptions& options, const ComputeContext& context);
  ~ShardedParameters() override;

  // Weights from the seed, moments zero.
  void initialise(uint64_t seed);
  // This rank's part of the training state, one entry a unit; writable. Where several ranks hold
  // the same, the ranges still are those of the layout (each rank saves 1/W), of part(); call
  // weights_changed() after writing.
  std::vector<ShardState> state();
  // What state() lies in, for whoever needs it longer than this lives.
  std::vector<Tensor> state_memory() const;
  // Which of the layout's W parts state() is.
  int part() const;
  // After state() was written: makes every replica and cached gather agree with the owners.
  // Collective.
  void weights_changed();

  void begin_pass(std::vector<int> use_order) override;
  UnitWeights use(int unit) override;
  void release(int unit) override;
  UnitGradients gradients(int unit) override;
  void gradients_done(int unit) override;

  // Announces how many passes with gradients make up the step, so that reductions that happen once
  // know when.
  void begin_step(int64_t passes);
  // Ends the step: when reductions are there, decides about the update and applies it; clears
  // gradients. sums [3] float64 on the context's device: [1] Σ loss and [2] target tokens of this
  // rank's passes, which become those of all ranks; [0] becomes Σ g². control: StepControl
  // (kernels/step_control), updated; the same on every rank. Nothing waits for the device.
  void update(const OptimizerConfig& optimizer, const StepRules& rules, uint64_t rounding_seed,
              TensorView sums, TensorView control);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
