// One worker's training in one generation: its state, its communicators, its data, and the step.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/config/config.h"
#include "common/protocol/muster.pb.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/coordinator_link.h"
#include "worker/device/compute_device.h"
#include "worker/elastic/connections.h"
#include "worker/elastic/handover.h"
#include "worker/elastic/mirror.h"
#include "worker/train/batch_stream.h"
#include "worker/train/train_step.h"

namespace muster {

class Trainer {
 public:
  // `config.model` is resolved. All that is referred to must outlive the trainer.
  Trainer(const Config& config, const Connections& connections, CoordinatorLink& link,
          DataClient& data, const ComputeDevice& device, Vault& vault);

  // The state to start from comes out of members' memory. Collective, with those that hand over.
  void take_over(const HandoverPlan& plan);
  // The state to start from: the assignment's checkpoint, or the seed. Collective.
  struct Loaded {
    bool everywhere = false;  // every rank has it: run() may follow
    std::string error;        // why this rank could not use the checkpoint
  };
  Loaded load();
  // Which of the layout's parts this rank holds.
  int part() { return step_.parameters().part(); }
  // Whether a step may be mirrored without waiting for memory.
  bool mirror_ready() const;

  enum class End {
    kFinished,  // the step marked last is trained, and its checkpoint's fate known
    kGoesOver,  // a newer assignment came and all steps planned before it are trained: this rank's
                // part of the state lies in the vault
  };
  // Trains the planned steps, and calls `between_steps` before each. On a GPU a step is reported
  // while the next one runs. Throws RunEnded, PeerError (Halted), DataError, or Error from the
  // guard. The vault then has this rank's part of the state: after CoordinatorGone, and after
  // PeerError where it was alone or the coordinator is silent.
  End run(const std::function<void()>& between_steps);

 private:
  // A step whose update is under way: what its report says beside the figures of the device.
  struct UnderWay {
    proto::StepReport report;
    double begin = 0.0;  // when the host began it, seconds of the clock
    int64_t tokens = 0;  // of the global batch, counted or not
    bool mirrored = false;
    bool behind = false;  // and its mirror may be sent after it
  };

  End train(const std::function<void()>& between_steps);
  std::optional<proto::PlannedStep> next_step();
  void carry_out(const proto::PlannedStep& step);
  void plan_batches(const proto::PlannedStep& step);
  void train_step(const proto::PlannedStep& step);
  void finish_mirror(UnderWay& mine);
  void let_go_of(const proto::PlannedStep& step);
  void tell_mirrored(proto::StepReport& report);
  void report_step(int behind);
  void report_all();
  void commit(const UnderWay& reported);
  void prepare_mirror_memory();
  void keep_state();
  void keep_whole_state();
  void set_progress(const TrainingProgress& progress);
  void evaluate(int64_t step);
  bool save(int64_t step);  // false: this rank's shard could not be written
  void note_samples(const Batch& batch, proto::StepReport& report) const;
  int64_t eval_samples() const;
  Deadline patience() const;  // for what another process or the device must do

  const Config& config_;
  const proto::Assignment assignment_;
  const int rank_;
  const HandoverLinks handover_;
  CoordinatorLink& link_;
  GroupedCommunicator& communicator_;
  DataClient& data_;
  const ComputeDevice& device_;
  Vault& vault_;
  TrainStep step_;
  std::unique_ptr<Mirror> mirror_;  // reads the state of step_; null: nobody mirrors
  BatchStream batches_;
  EmptyBatch empty_;
  std::deque<proto::PlannedStep> planned_;
  std::deque<UnderWay> under_way_;
  double last_end_ = 0.0;                 // when the last step was known to have ended
  TrainingProgress progress_;             // as of the step reported last
  int64_t done_ = 0;                      // the step reported last
  bool secured_ = false;                  // nobody goes back behind this generation's first step
  std::optional<int64_t> told_mirrored_;  // reported
  bool updating_ = false;                 // an update has begun and not returned
};

}  // namespace muster
