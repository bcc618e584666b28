// Full weights of units in the compute dtype: gathered ahead of their use along the pass's order,
// and freed after it or kept until the weights change.
#pragma once

#include <memory>
#include <vector>

#include "worker/comm/communicator.h"
#include "worker/model/model.h"
#include "worker/sharding/flat_unit.h"

namespace muster {

class WeightGatherer {
 public:
  struct Options {
    bool whole = false;           // `weights` are whole on every rank: nothing is gathered
    bool free_after_use = false;  // else kept until invalidate()
    int64_t prefetch_units = 1;
  };
  // `weights`: one buffer a unit: the master shard, float32 [shard], or when `whole` what is used,
  // compute dtype [padded]. They must outlive this. So must `units`.
  WeightGatherer(const std::vector<FlatUnit>& units, std::vector<TensorView> weights,
                 Communicator& communicator, const Options& options, const ComputeContext& context);

  void begin_pass(std::vector<int> use_order);
  // The flat unit [padded], compute dtype.
  TensorView use(int unit);
  void release(int unit);
  // The weights have changed: drops what was kept. No unit is in use.
  void invalidate();

 private:
  struct Unit {
    Tensor full;                 // undefined: not here, or the weights are whole
    std::unique_ptr<Work> work;  // the gather, until it has been waited for
    int users = 0;
  };
  void start(int unit);
  // Comes within the next `prefetch_units` uses.
  bool soon(int unit) const;

  const std::vector<FlatUnit>& units_;
  std::vector<TensorView> weights_;
  Communicator& communicator_;
  Options options_;
  ComputeContext context_;
  std::vector<Unit> state_;
  std::vector<int> order_;
  size_t next_ = 0;  // index into order_ of the next use
};

}  // namespace muster
