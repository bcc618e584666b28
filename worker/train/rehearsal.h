// A step without peers and data: the same code that trains asks for the same tensors and launches
// the same kernels, on a made-up batch. On the plan device it shows what memory a step takes; on a
// GPU it loads kernels and chooses the algorithms of products, which a worker that joins a run does
// before the others wait for it.
#pragma once

#include <memory>

#include "common/config/config.h"
#include "worker/train/train_step.h"

namespace muster {

class Rehearsal {
 public:
  // Of `rank` of `world_size`; `config.model` is resolved. Takes what lasts; weights are undefined.
  Rehearsal(const Config& config, int rank, int world_size, const ComputeContext& context);
  ~Rehearsal();

  // A step of as many passes as show all there is to see, and an evaluation. Nothing waits for the
  // device. Results are as undefined as the weights.
  void run();

 private:
  class AbsentPeers;

  const Config& config_;
  const ComputeContext context_;
  const int64_t passes_;
  std::unique_ptr<AbsentPeers> world_;
  std::unique_ptr<AbsentPeers> shard_;
  std::unique_ptr<AbsentPeers> replicas_;
  std::unique_ptr<TrainStep> step_;
};

}  // namespace muster
