// Gradients of units: accumulated in full float32 buffers here, summed over the ranks in the
// background, and left as what this rank needs for its update. Where shard groups are smaller than
// the world, sums over a group are summed over the replicas once a step, always in float32: that
// is all that the network between the groups has to carry.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "worker/comm/groups.h"
#include "worker/model/model.h"
#include "worker/sharding/flat_unit.h"

namespace muster {

class GradientReducer {
 public:
  // With kFull and kGrad every pass is reduced into a shard, with kOptimizer and kNone the sum of
  // all passes of the step is reduced once; kNone: over all ranks. `reduce_dtype`: float32, or
  // bfloat16 to halve what travels (the sums over passes stay float32). `units` must outlive this.
  GradientReducer(const std::vector<FlatUnit>& units, const Groups& groups, ShardMode mode,
                  DType reduce_dtype, const ComputeContext& context);

  void begin_step(int64_t passes);
  // Where this pass accumulates.
  UnitGradients gradients(int unit);
  void gradients_done(int unit);

  // Makes the stream wait until everything is reduced. Every unit must have been done in every
  // pass.
  void finish();
  // After finish(): the sums over ranks and passes of all units one behind the other, [Σ room];
  // padding is zero.
  TensorView reduced() const { return reduced_; }
  // Forgets the step's gradients. Waits for what is still under way.
  void clear();

 private:
  struct Unit {
    TensorView sum;      // its part of reduced_
    Tensor full;         // [padded], while passes accumulate; kNone: `sum` itself is used
    int64_t passes = 0;  // done in this step
    bool touched = false;
  };
  struct Reduction {
    int unit;
    Tensor full;  // what travels
    Tensor own;   // [shard], the result, unless it goes to `sum` at once
    bool last;    // of the unit in this step
    std::unique_ptr<Work> work;
  };
  bool every_pass() const { return mode_ == ShardMode::kFull || mode_ == ShardMode::kGrad; }
  TensorView full(int unit);
  void reduce(int unit);
  void complete_oldest();
  void complete_all();

  const std::vector<FlatUnit>& units_;
  Groups groups_;
  ShardMode mode_;
  DType reduce_dtype_;
  ComputeContext context_;
  Tensor reduced_;
  std::vector<Unit> state_;
  std::deque<Reduction> under_way_;
  std::vector<std::unique_ptr<Work>> replicating_;  // sums over the replicas under way
  int64_t passes_ = 1;
};

}  // namespace muster
