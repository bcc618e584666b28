// FSDP / ZeRO: the training state of one worker, and the Parameters that the model sees.
//
//   parallel.shard   weights                          gradients, float32            masters, m, v
//   full             gathered per use, freed after    reduce-scattered every pass   1/W
//   grad             gathered once a step, kept       reduce-scattered every pass   1/W
//   optimizer        gathered once a step, kept       summed here, then once        1/W
//   none             whole everywhere                 summed here, all-reduced      whole
//
// Every rank makes the same passes over the same units: also one that has fewer samples (it adds
// zero gradients). With one rank every mode is "none": weights are used where they lie.
// An instance must not outlive its communicator; whoever gives up in mid-step aborts that first,
// or the destructor waits for collectives that no peer may join.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/config/config.h"
#include "worker/comm/communicator.h"
#include "worker/model/model.h"
#include "worker/sharding/layout.h"

namespace muster {

// One unit's owned elements of one kind of state.
struct ShardState {
  int unit = 0;
  Range range;        // which elements of the flat unit
  TensorView weight;  // [range.size()] float32
  TensorView m;
  TensorView v;
};

struct UpdateResult {
  double grad_norm = 0.0;  // of the mean gradient, before clipping
  bool skipped = false;    // the norm (or the loss) was not finite: nothing was changed
};

class ShardedParameters : public Parameters {
 public:
  // `mode`: parallel.shard. Allocates everything that lasts; weights are undefined until
  // initialise() or a load through state().
  ShardedParameters(std::vector<UnitSpec> units, Communicator& communicator,
                    const std::string& mode, int64_t prefetch_units, const ComputeContext& context);
  ~ShardedParameters() override;

  // Weights from the seed, moments zero.
  void initialise(uint64_t seed);
  // This rank's part of the training state, one entry a unit; writable. With mode "none" every rank
  // holds everything, and the ranges still are those of the layout (each rank saves 1/W); call
  // weights_changed() after writing.
  std::vector<ShardState> state();
  // After state() was written: makes every copy (mode "none") and cached gather agree with the
  // owners. Collective.
  void weights_changed();

  void begin_pass(std::vector<int> use_order) override;
  UnitWeights use(int unit) override;
  void release(int unit) override;
  UnitGradients gradients(int unit) override;
  void gradients_done(int unit) override;

  // Announces how many passes with gradients make up the step, so that reductions that happen once
  // know when.
  void begin_step(int64_t passes);
  // Ends the step: waits for reductions, takes the global norm of gradients · grad_scale
  // (grad_scale = 1 / target tokens of the global batch), clips, applies AdamW; clears gradients.
  // `update_number` counts applied updates from 1 (bias correction). With `apply` false nothing is
  // changed and gradients are cleared.
  UpdateResult update(const OptimizerConfig& optimizer, double lr, int64_t update_number,
                      double grad_scale, bool apply);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
