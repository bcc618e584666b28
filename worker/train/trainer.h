// One worker's training in one generation: its state, its communicator, its data, and the step.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "common/config/config.h"
#include "common/protocol/muster.pb.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/comm/communicator.h"
#include "worker/coordinator_link.h"
#include "worker/model/model.h"
#include "worker/sharding/sharded_parameters.h"
#include "worker/train/batch_stream.h"

namespace muster {

class Trainer {
 public:
  // `config.model` is resolved. `communicator` and `data` must outlive the trainer.
  Trainer(const Config& config, const proto::Assignment& assignment, CoordinatorLink& link,
          Communicator& communicator, DataClient& data, const ComputeContext& context);

  // The state to start from: the assignment's checkpoint, or the seed. Collective.
  struct Loaded {
    bool everywhere = false;  // every rank has it: run() may follow
    std::string error;        // why this rank could not use the checkpoint
  };
  Loaded load();
  // Trains every planned step up to the one marked last, and waits for its checkpoint. Throws
  // RunEnded, PeerError, DataError, or Error from the guard.
  void run();

 private:
  struct Totals {
    double loss = 0.0;    // sum over target tokens
    double tokens = 0.0;  // target tokens
  };

  proto::PlannedStep next_step();
  void plan_batches(const proto::PlannedStep& step);
  proto::StepReport train_step(const proto::PlannedStep& step);
  Totals train_pass(proto::StepReport& report);
  void evaluate(int64_t step);
  bool save(int64_t step);  // false: this rank's shard could not be written
  Totals sum_over_ranks(Totals mine);
  void note_samples(const Batch& batch, proto::StepReport& report) const;
  int64_t eval_samples() const;
  Deadline patience() const;  // for what another process must do

  const Config& config_;
  proto::Assignment assignment_;
  CoordinatorLink& link_;
  Communicator& communicator_;
  DataClient& data_;
  ComputeContext context_;
  Model model_;
  ShardedParameters parameters_;
  CheckpointPolicy policy_;
  BatchStream batches_;
  EmptyBatch empty_;
  std::deque<proto::PlannedStep> planned_;
  TrainingProgress progress_;
};

}  // namespace muster
