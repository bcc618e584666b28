// One generation at work: hands out steps, commits them when all ranks have reported, commits
// checkpoints. Knows ranks, not sockets; members and faults are the session's.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/config/config.h"
#include "common/protocol/muster.pb.h"
#include "common/transport/transport.h"
#include "coordinator/checkpoints.h"
#include "coordinator/plan.h"
#include "coordinator/run_log.h"
#include "coordinator/sample_order.h"
#include "coordinator/save_ledger.h"
#include "coordinator/step_ledger.h"

namespace muster {

// Tokens trained on up to each of the last steps.
using TokenHistory = std::map<int64_t, int64_t>;

struct GenerationStart {
  uint64_t generation = 0;
  std::vector<std::string> members;  // ids by rank
  int64_t step = 0;                  // committed
  int64_t checkpoint_step = 0;       // newest whole checkpoint, 0: none
  TokenHistory tokens;               // up to `step`, which it holds
  bool paused = false;         // saves the state and plans nothing else: too few workers to train
  bool mirrors_ready = false;  // every rank has the memory of mirrors; else it is waited for
  DatasetFacts dataset;
};

// How a run ended, and what a person should know about it.
struct Outcome {
  bool ok = false;
  std::string reason;
};

// What is said where the checkpoint of `step` is the end of the run already.
std::string nothing_left(int64_t step, const Config& config);

class Training {
 public:
  using SendToRank = std::function<void(int rank, const Message& message)>;

  // `config`, `config_toml`, `run` and `log` must outlive the training.
  Training(const Config& config, const std::string& config_toml, const RunDir& run, RunLog* log,
           const GenerationStart& start, SendToRank send);

  // Every rank is ready: hands out the first steps.
  void begin(double now);
  // The next step that is not handed out yet becomes the last: it is saved, and the run ends well.
  void leave(const std::string& reason);
  // Another coordinator handed steps out, nobody knows how many: their reports may come, for
  // break_off() to count.
  void expect_reports();
  // No more steps are handed out: another generation follows. Returns the step that is the last of
  // this one. Not once the run's last step is handed out.
  int64_t close();
  // After close(): every step handed out is committed, and every save settled.
  bool finished() const { return committed_ == planned_ && saves_.empty(); }
  // The generation broke off. Steps up to `step` count if any rank has reported them; saves under
  // way are given up.
  void break_off(int64_t step, double now);

  void on_step_report(const proto::StepReport& report, double now);
  void on_eval_report(const proto::EvalReport& report, double now);
  void on_shard_saved(const proto::ShardSaved& saved, double now);

  // Set once the last step and its checkpoint are committed, or that checkpoint has failed.
  const std::optional<Outcome>& outcome() const { return outcome_; }
  bool leaving() const { return leave_reason_.has_value(); }
  const std::optional<std::string>& leave_reason() const { return leave_reason_; }
  // The run's last step is handed out.
  bool ending() const { return last_planned_; }
  bool paused() const { return start_.paused; }
  uint64_t generation() const { return start_.generation; }
  int64_t first_step() const { return start_.step; }
  int world() const { return static_cast<int>(start_.members.size()); }
  const std::vector<std::string>& members() const { return start_.members; }
  // -1: not in this generation.
  int rank_of(const std::string& member_id) const;
  int64_t committed() const { return committed_; }
  const StepMetrics& metrics() const { return metrics_; }  // of the last committed step
  int64_t checkpoint_step() const { return checkpoint_step_; }
  const std::optional<double>& held_out_loss() const { return held_out_loss_; }
  int64_t tokens() const { return tokens_.at(committed_); }
  const TokenHistory& token_history() const { return tokens_; }
  int64_t mirror_every() const { return mirror_every_; }
  // Nobody needs what is left of the generation before: this one has a mirror or a checkpoint, or
  // never has a mirror and has trained a step.
  bool secured() const;
  // Seconds of the committed steps of this generation.
  double trained_s() const { return trained_s_; }

 private:
  void plan();
  void plan_save();
  void send_to_all(const Message& message);
  bool mirror_next();
  void commit_steps(double now);
  void commit_step(const CompleteStep& step, double now);
  void heed_mirrors(const CompleteStep& step);
  void finish_save(const CompleteSave& save, double now);
  Manifest manifest_of(const CompleteSave& save) const;
  void finish_if_done();

  const Config& config_;
  const std::string& config_toml_;
  const RunDir& run_;
  RunLog* log_;
  const GenerationStart start_;
  std::unordered_map<std::string, int> ranks_;  // by member id
  SendToRank send_;
  PlanOptions plan_options_;
  SampleOrder order_;
  StepLedger steps_;
  SaveLedger saves_;

  int64_t planned_;  // steps up to this one are handed out
  bool last_planned_ = false;
  bool closed_ = false;
  int64_t committed_;
  TokenHistory tokens_;
  bool mirrors_ready_;
  int64_t mirrored_ = -1;        // newest step whose state is planned to be mirrored
  int64_t first_mirrored_ = -1;  // oldest
  int64_t mirror_every_ = 1;
  bool mirror_behind_;        // how the next one is to be sent: maybe behind later steps
  bool sent_behind_ = false;  // how the newest one is
  int64_t whole_ = -1;        // newest step whose state every rank has mirrored
  double mirror_s_ = 0.0;     // what the last mirrored step took longer; 0: not known
  double trained_s_ = 0.0;
  StepMetrics metrics_;
  std::optional<double> held_out_loss_;
  int64_t checkpoint_step_;
  double save_begun_ = 0.0;  // when the step to be saved was committed, seconds
  std::string save_error_;   // of the last step's checkpoint
  std::optional<std::string> leave_reason_;
  std::optional<Outcome> outcome_;
};

}  // namespace muster
