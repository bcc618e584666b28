// A run from the first hello to the last goodbye: members, generations, faults, the end. Takes
// messages and the time, and sends through a function; the event loop (coordinator.cc) owns socket,
// signals and clock.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "common/config/config.h"
#include "common/protocol/muster.pb.h"
#include "common/run_dir.h"
#include "coordinator/membership.h"
#include "coordinator/run_log.h"
#include "coordinator/store.h"
#include "coordinator/training.h"

namespace muster {

enum class Phase { kJoining, kStarting, kTraining, kStopping, kEnding, kOver };

struct SessionOptions {
  int expected_workers = 0;    // 0: what the first node agents bring
  std::string resume_command;  // as CoordinatorOptions
  std::string run_token;       // what the run directory's token file holds; empty: none does
};

class Session {
 public:
  // False when the peer is not connected or does not take messages.
  using Send = std::function<bool(const std::string& peer, proto::Envelope envelope)>;

  // `config.run.dir` is absolute. `log` must outlive the session. `now`: seconds of a steady clock,
  // as below.
  Session(const Config& config, const SessionOptions& options, RunLog* log, Send send, double now);

  // A message from `peer`. What a peer says out of turn is ignored or refused, never a failure of
  // ours.
  void handle(const std::string& peer, const proto::Envelope& envelope, double now);
  // Heartbeats, deadlines, decisions. To be called at least every heartbeat, and after each
  // message.
  void tick(double now);
  // Somebody outside asks the run to end: with its state saved, or at once (then the outcome is not
  // ok).
  void request_stop(const std::string& reason, bool immediately, double now);

  // The run cannot go on, for a reason that its members do not see: it ends, not ok.
  void abandon(const std::string& reason, double now);

  // When tick() has something to do next, seconds.
  double next_tick() const { return next_tick_; }
  Phase phase() const { return phase_; }
  bool over() const { return phase_ == Phase::kOver; }
  // Set from kEnding on.
  const std::optional<Outcome>& outcome() const { return outcome_; }
  proto::Status status(double now) const;

 private:
  // A fault that is not final yet: a better explanation may arrive.
  struct Suspicion {
    std::string member_id;
    std::string reason;
    double due = 0.0;
    double since = 0.0;
    bool secondary = false;    // the member says that another one's failure stopped it
    bool unreachable = false;  // taken back when the member is heard again
  };

  void on_hello(const std::string& peer, const proto::Envelope& envelope, double now);
  void on_status_request(const std::string& peer, uint64_t request_id, double now);
  void on_dataset_report(const Member& member, const proto::DatasetReport& report, double now);
  void warn_of_no_evaluation(const proto::DatasetReport& report);
  void on_ready(const Member& member, const proto::Ready& ready, double now);
  void on_worker_message(const std::string& peer, Member* member, const proto::Envelope& envelope,
                         double now);
  void on_worker_failed(const Member& member, const proto::WorkerFailed& failed, double now);
  void on_process_exited(const proto::ProcessExited& exited, double now);
  void on_withdrawn(Member* member, const std::string& reason);
  void on_leaving(Member* member, const std::string& reason, double now);

  void try_start(double now);
  void begin_generation(const std::string& reason, double now);
  std::optional<Manifest> choose_state(double now);
  void warn_of_changes(const Manifest& manifest);
  void send_assignments();
  void check_ready_deadline(double now);
  void note_outcome(double now);

  void suspect(const Suspicion& suspicion);
  void judge_suspicion(double now);
  // The run ends for this reason: with the step and the way to resume added, or as it is.
  void fault(const std::string& reason, double now);
  void give_up(const std::string& reason, double now);
  void end(const Outcome& outcome, double now);
  void watch_departures(double now);
  void beat(double now);

  Member* member_of_peer(const std::string& peer);
  Member* find_member(const std::string& id);
  Member* worker_of_rank(int rank);
  bool send_to(const Member& member, proto::Envelope envelope);
  void send_to_rank(int rank, proto::Envelope envelope);
  void refuse(const std::string& peer, uint64_t request_id, const std::string& reason);
  void event(const std::string& kind, const std::string& reason, double duration_s = 0.0);
  std::string resume_hint() const;
  int64_t committed() const { return training_ ? training_->committed() : 0; }

  const Config config_;
  const std::string config_toml_;
  const RunDir run_;
  RunLog* log_;
  Send send_;
  const std::string resume_command_;
  const std::string run_token_;
  MembershipOptions options_;

  Phase phase_ = Phase::kJoining;
  MembershipState state_;
  std::map<std::string, std::string> peer_of_;    // member id → routing id
  std::map<std::string, std::string> member_of_;  // routing id → member id
  int64_t skipped_files_ = 0;
  int64_t partly_used_files_ = 0;
  std::string waiting_for_;  // while joining

  uint64_t generation_ = 0;
  std::set<int64_t> unusable_;        // checkpoints that workers could not load
  std::map<int, std::string> ready_;  // rank → checkpoint error
  double assigned_at_ = 0.0;
  int64_t resume_step_ = 0;
  RendezvousStore store_;
  std::optional<Training> training_;  // of the newest generation

  double started_;
  double now_ = 0.0;  // of the call in progress
  double next_beat_;
  double next_tick_;
  std::optional<Suspicion> suspicion_;
  std::optional<Outcome> outcome_;
  double ending_since_ = 0.0;
  std::map<std::string, double> watchers_;  // peers that ask for Status → when they last did
};

}  // namespace muster
