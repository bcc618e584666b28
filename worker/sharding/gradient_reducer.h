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
  // all passes of the step is reduced once. `units` must outlive this.
  GradientReducer(const std::vector<FlatUnit>& units, Communicator& communicator, ShardMode mode,
                  const ComputeContext& context);

  void begin_step(int64_t passes);
  // The flat unit [padded], where this pass accumulates; zero at first.
  TensorView gradients(int unit);
  void gradients_done(int unit);

  // Waits until everything is reduced. Every unit must have been done in every pass.
  void finish();
  // After finish(): the sum over ranks and passes; [shard], with kNone [padded].
  TensorView reduced(int unit) const;
  // Forgets the step's gradients. Waits for what is still under way.
  void clear();

 private:
  struct Unit {
    Tensor full;         // [padded], while passes accumulate
    Tensor shard;        // [shard], kFull and kGrad: sum of the passes reduced so far
    int64_t passes = 0;  // done in this step
  };
  struct Reduction {
    int unit;
    Tensor full;
    std::unique_ptr<Work> work;
  };
  bool every_pass() const { return mode_ == ShardMode::kFull || mode_ == ShardMode::kGrad; }
  void complete_oldest();

  const std::vector<FlatUnit>& units_;
  Communicator& communicator_;
  ShardMode mode_;
  ComputeContext context_;
  std::vector<Unit> state_;
  std::deque<Reduction> under_way_;
  int64_t passes_ = 1;
};

}  // namespace muster
