// A training step as it is computed: passes, the update, and the figures that the host reads
// afterwards. Knows no coordinator and no data service; nothing in it waits for the device but
// StepOutcome::wait().
#pragma once

#include <cstdint>
#include <memory>

#include "common/config/config.h"
#include "common/deadline.h"
#include "data/batch.h"
#include "kernels/runtime/runtime.h"
#include "kernels/step_control/step_control.h"
#include "worker/comm/groups.h"
#include "worker/model/model.h"
#include "worker/sharding/sharded_parameters.h"
#include "worker/train/batch_upload.h"

namespace muster {

// Figures on their way from the device.
class Readback {
 public:
  // Room for `bytes`; reused from one start() to the next.
  Readback(size_t bytes, const ComputeContext& context);
  // Copies `from` ([bytes] of any type) when what is enqueued now has happened.
  void start(ConstTensorView from);
  // The bytes, when they are there. Throws what ended the communicator, or TimeoutError.
  const void* wait(Deadline deadline, const Communicator& communicator) const;

 private:
  Stream stream_;
  Tensor host_;
  Event event_;
};

class TrainStep {
 public:
  // `config.model` is resolved. The groups are those of parallel.shard_group; their communicators
  // must outlive this.
  TrainStep(const Config& config, const Groups& groups, const ComputeContext& context);

  const Model& model() const { return model_; }
  ShardedParameters& parameters() { return parameters_; }
  // Where training stands; before the first step, and when all outcomes have been waited for.
  void set_progress(const StepControl& control);

  // A step: begin, `passes` times train, update. Batches lie in host memory and may go when train()
  // has returned.
  void begin(int64_t passes);
  void train(const Batch& batch);
  void update(double lr);
  // What came of the update before the last `behind` (0 or 1) ones.
  StepControl outcome(int behind, Deadline deadline) const;

  // Sum of losses and number of target tokens of held-out batches, over all ranks.
  struct Evaluation {
    double loss = 0.0;
    double tokens = 0.0;
  };
  void begin_evaluation();
  void evaluate(const Batch& batch);
  Evaluation end_evaluation(Deadline deadline);

 private:
  void send_tokens();

  const Config& config_;
  Communicator& communicator_;
  ComputeContext context_;
  Model model_;
  ShardedParameters parameters_;
  CheckpointPolicy policy_;
  BatchUpload upload_;
  Tensor sums_;          // [3] float64: Σ g², Σ loss, target tokens (ShardedParameters::update)
  Tensor control_;       // StepControl
  double tokens_ = 0.0;  // of this rank's passes
  // Of the last two updates, by turns.
  struct Turn {
    Tensor tokens;  // [1] float64 in host memory, on its way to sums_
    std::unique_ptr<Readback> outcome;
  };
  Turn turns_[2];
  int64_t updates_ = 0;  // made since the start
};

}  // namespace muster
