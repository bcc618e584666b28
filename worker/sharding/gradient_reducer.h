// Gradients of units: accumulated in full float32 buffers here, summed over the ranks in the
// background, and left as what this rank needs for its update.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "worker/comm/communicator.h"
#include "worker/model/model.h"
#include "worker/sharding/flat_unit.h"

namespace muster {

class GradientReducer {
 public:
  // With kFull and kGrad every pass is reduced into a shard, with kOptimizer and kNone the sum of
  // all passes of the step is reduced once. `reduce_dtype`: float32, or bfloat16 to halve what
  // travels (the sums over passes stay float32). `units` must outlive this.
  GradientReducer(const std::vector<FlatUnit>& units, Communicator& communicator, ShardMode mode,
                  DType reduce_dtype, const ComputeContext& context);

  void begin_step(int64_t passes);
  // Where this pass accumulates.
  UnitGradients gradients(int unit);
  void gradients_done(int unit);

  // Makes the stream wait until everything is reduced. Every unit must have been done in every
  // pass.
  void finish();
  // After finish(): the sums over ranks and passes of all units one behind the other, [Σ shard],
  // with kNone [Σ padded]; padding is zero.
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
    std::unique_ptr<Work> work;
  };
  bool every_pass() const { return mode_ == ShardMode::kFull || mode_ == ShardMode::kGrad; }
  TensorView full(int unit);
  void reduce(int unit);
  void complete_oldest();

  const std::vector<FlatUnit>& units_;
  Communicator& communicator_;
  ShardMode mode_;
  DType reduce_dtype_;
  ComputeContext context_;
  Tensor reduced_;
  std::vector<Unit> state_;
  std::deque<Reduction> under_way_;
  int64_t passes_ = 1;
};

}  // namespace muster
