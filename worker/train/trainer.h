// One worker's training in one generation: its state, its communicators, its data, and the step.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "common/config/config.h"
#include "common/protocol/muster.pb.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/comm/groups.h"
#include "worker/coordinator_link.h"
#include "worker/device/compute_device.h"
#include "worker/train/batch_stream.h"
#include "worker/train/train_step.h"

namespace muster {

class Trainer {
 public:
  // `config.model` is resolved. All that is referred to must outlive the trainer.
  Trainer(const Config& config, const proto::Assignment& assignment, CoordinatorLink& link,
          const Groups& groups, DataClient& data, const ComputeDevice& device);

  // The state to start from: the assignment's checkpoint, or the seed. Collective.
  struct Loaded {
    bool everywhere = false;  // every rank has it: run() may follow
    std::string error;        // why this rank could not use the checkpoint
  };
  Loaded load();
  // Trains every planned step up to the one marked last, and waits for its checkpoint. On a GPU a
  // step is reported while the next one runs. Throws RunEnded, PeerError, DataError, or Error from
  // the guard.
  void run();

 private:
  // A step whose update is under way: what its report says beside the figures of the device.
  struct UnderWay {
    proto::StepReport report;
    double begin = 0.0;  // when the host began it, seconds of the clock
    int64_t tokens = 0;  // of the global batch, counted or not
  };

  proto::PlannedStep next_step();
  void plan_batches(const proto::PlannedStep& step);
  void train_step(const proto::PlannedStep& step);
  void report_step(int behind);
  void evaluate(int64_t step);
  bool save(int64_t step);  // false: this rank's shard could not be written
  void note_samples(const Batch& batch, proto::StepReport& report) const;
  int64_t eval_samples() const;
  Deadline patience() const;  // for what another process or the device must do

  const Config& config_;
  proto::Assignment assignment_;
  CoordinatorLink& link_;
  Communicator& communicator_;
  DataClient& data_;
  const ComputeDevice& device_;
  TrainStep step_;
  BatchStream batches_;
  EmptyBatch empty_;
  std::deque<proto::PlannedStep> planned_;
  std::deque<UnderWay> under_way_;
  double last_end_ = 0.0;      // when the last step was known to have ended
  TrainingProgress progress_;  // as of the step reported last
};

}  // namespace muster
