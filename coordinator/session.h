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
#include <unordered_map>
#include <vector>

#include "common/config/config.h"
#include "common/protocol/muster.pb.h"
#include "common/run_dir.h"
#include "common/transport/transport.h"
#include "coordinator/membership.h"
#include "coordinator/pause_clock.h"
#include "coordinator/recovery.h"
#include "coordinator/run_log.h"
#include "coordinator/store.h"
#include "coordinator/stragglers.h"
#include "coordinator/training.h"

namespace muster {

// kJoining: nobody trains, as workers are missing; kStarting: a generation is assigned, the one
// before may still train its last steps; kHalting: the generation broke off, and those who live are
// asked what state they hold.
enum class Phase { kJoining, kStarting, kTraining, kStopping, kHalting, kEnding, kOver };

// Members' roles on the wire. Nothing: not a member's.
std::optional<MemberRole> role_of(proto::Role role);
proto::Role to_proto(MemberRole role);

struct SessionOptions {
  int expected_workers = 0;    // 0: what the first node agents bring
  std::string resume_command;  // as CoordinatorOptions
  std::string run_token;       // what the run directory's token file holds; empty: none does
};

// All who are in an assignment, by id: the members' ranks, then those who only hand over.
using Places = std::unordered_map<std::string, int>;

// A generation that gets ready beside the one that trains.
struct Preparing {
  std::vector<std::string> members;  // ids by rank
  Places places;
  std::string reason;
  double since = 0.0;
  std::map<std::string, bool> prepared;  // who has said something of that: whether it was all
  size_t complete = 0;                   // how many have said all
  bool crowded = false;                  // somebody has no room for connections beside training
  std::set<std::string> shown;           // who has put something into the store
};

class Session {
 public:
  // False when the peer is not connected or does not take messages.
  using Send = std::function<bool(const std::string& peer, const Message& message)>;

  // `config.run.dir` is absolute. `log` must outlive the session. `now`: seconds of a steady clock,
  // as below.
  Session(const Config& config, const SessionOptions& options, RunLog* log, Send send, double now);

  // Goes on with the run of a coordinator that was killed, from what it left in the log. Its
  // members are asked what state they hold as they say hello again; those that do not come are lost
  // after five heartbeats, and if none does, the run starts as if it had not been restored. False:
  // nothing was left, or nothing that can be read.
  bool restore(double now);

  // A message from `peer`. What a peer says out of turn is ignored or refused, never a failure of
  // ours.
  void handle(const std::string& peer, const proto::Envelope& envelope, double now);
  // Heartbeats, deadlines, decisions. To be called at next_tick(), and after each message.
  void tick(double now);
  // Somebody outside asks the run to end: with its state saved, or at once (then the outcome is not
  // ok).
  void request_stop(const std::string& reason, bool immediately, double now);
  // The run is to have this many workers; they leave, or `muster drain` names who does. Return what
  // follows; throw ConfigError when it cannot be.
  std::string scale(int workers, double now);
  std::string drain(const std::string& who, const std::string& reason, double now);

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
    double since = 0.0;
    bool secondary = false;    // the member says that another one's failure stopped it
    bool unreachable = false;  // taken back when the member is heard again
    double due = 0.0;          // set by suspect()
  };

  void on_worker_message(const std::string& peer, Member* member, const proto::Envelope& envelope,
                         double now);
  void on_status_request(const std::string& peer, uint64_t request_id, double now);
  void notice_absence(double now);
  void look_soon();
  void beat(double now);
  Member* member_of_peer(const std::string& peer);
  Member* find_member(const std::string& id);
  Member* add_member(Member member);
  static bool is_here(const Member& member) { return !member.peer.empty(); }
  // Known from the coordinator before, and not heard yet.
  bool may_come_back(const Member& member) const { return restored_ && !is_here(member); }
  bool send_to(const Member& member, const Message& message);
  void send_or_suspect(const std::string& id, const Message& message);
  void refuse(const std::string& peer, uint64_t request_id, const std::string& reason);
  void event(const std::string& kind, const std::string& reason, double duration_s = 0.0);
  int64_t committed() const { return training_ ? training_->committed() : resume_step_; }

  // session_members.cc: who comes, leaves, and is lost.
  void on_hello(const std::string& peer, const proto::Envelope& envelope, double now);
  void replace_data(const Member& newcomer, double now);
  void on_withdrawn(Member* member, const std::string& reason);
  void on_leaving(Member* member, const std::string& reason, double now);
  void on_process_exited(Member* agent, const proto::ProcessExited& exited, double now);
  void take_exit(const proto::ProcessExited& exited, double now);
  static void note_load(Member* agent, const proto::NodeLoad& load);
  bool turn_away_surplus(Member* worker, double now);
  void suspect(const Suspicion& suspicion);
  bool disproved(const Suspicion& suspicion);
  void judge_suspicion(double now);
  void kill(const Member& member, const std::string& reason);
  void lose(Member* member, const std::string& reason, double now);
  bool takes_part(const Member& worker) const;
  void lose_worker(Member* member, const std::string& reason, double now);
  void lose_data(Member* member, const std::string& reason, bool replaced, double now);
  void lose_node(Member* agent, const std::string& reason, double now);
  void dismiss(Member* member, const std::string& reason, bool ok, double now);
  void dismiss_empty_nodes(double now);

  // session_data.cc: what the nodes' data services say.
  void on_dataset_report(const Member& member, const proto::DatasetReport& report, double now);
  void warn_of_no_evaluation(const proto::DatasetReport& report);
  void turn_away(const std::string& node_id, const std::string& reason, double now);
  void tell_of_data(const std::string& node_id, const std::string& endpoint);

  // session_orders.cc: what people ask for.
  void on_order(const std::string& peer, const proto::Envelope& envelope, double now);
  void drain(Member* member, const std::string& reason);
  // Workers that are on their way, of nodes that take part, by agent's id.
  std::map<std::string, int> coming_workers() const;
  int missing_workers() const;
  void send_away_coming(int count);
  // Asks nodes for `count` more, or as many as they take; returns how many.
  // `only_room`: on those alone that train, and have fewer workers than they brought.
  int start_workers(int count, bool only_room);
  void replace_lost();

  // session_start.cc: generations that begin.
  bool assigned_member(const std::string& id) const;
  void try_start(double now);
  std::optional<Manifest> choose_state(double now);
  void warn_of_changes(const Manifest& manifest);
  void start_again(double now);
  void begin_generation(const std::string& reason, double now);
  void assign(const std::optional<Recovery>& handover, const std::string& reason, double now);
  void take_up(std::vector<std::string> members, Places places, const std::string& reason,
               double now);
  proto::Assignment make_assignment(const std::vector<std::string>& members,
                                    const std::optional<Recovery>& handover, Places* places);
  void send_to_all(const Places& places, const Message& message);
  void on_ready(const Member& member, const proto::Ready& ready, double now);
  void start_training(double now);
  void check_ready_deadline(double now);

  // session_resize.cc: generations that follow one that trains.
  void consider_resize(double now);
  void prepare(const std::string& reason, double now);
  bool prepares_only(const Member& member) const;
  void call_off(const std::string& reason);
  void dismiss_from_preparation(Member* member, const std::string& reason);
  void on_prepared(const Member& member, const proto::Prepared& prepared, double now);
  void go_over(double now);
  void check_preparation(double now);
  void check_prepared_deadline(double now);
  void newcomer_failed(Member* member, const proto::WorkerFailed& failed, const std::string& reason,
                       double now);
  void release_leavers(double now);

  // session_change.cc: generations that end.
  // Workers of the generation that trains, or of one that is to begin: those who may hold state.
  std::vector<Member*> holders();
  void watch_changes(double now);
  void after_commits(double now);
  void watch_speed(const Member& member, const proto::StepReport& report);
  void on_worker_failed(const Member& member, const proto::WorkerFailed& failed, double now);
  void halt(const std::string& reason, double now);
  void await_holders();
  static Message halt_message(uint64_t generation, const std::string& reason);
  void on_halted(Member* member, const proto::Halted& halted, double now);
  void finish_halt(double now);
  void go_on(const std::string& reason, double now);
  void wait_for_workers(const std::string& reason, double now);

  // session_restore.cc: what outlives this process.
  void keep_for_restore();
  void begin_anew(double now);

  // session_end.cc
  // The run ends for this reason: with the step and the way to resume added, or as it is.
  void fault(const std::string& reason, double now);
  void give_up(const std::string& reason, double now);
  std::string resume_hint() const;
  void note_outcome(double now);
  void end(const Outcome& outcome, double now);
  void watch_departures(double now);

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
  // Places in state_.members, where everybody stays.
  std::unordered_map<std::string, size_t> by_id_;
  std::unordered_map<std::string, size_t> by_peer_;
  int64_t skipped_files_ = 0;
  int64_t partly_used_files_ = 0;
  std::string waiting_for_;  // while joining

  uint64_t generation_ = 0;            // newest assigned
  std::vector<std::string> assigned_;  // its members, ids by rank
  Places places_;
  bool assigned_paused_ = false;  // it is too small to train
  std::string assigned_reason_;
  std::map<std::string, proto::Ready> ready_;  // what they said, by id
  std::vector<std::string> parts_;             // of the generation that trains: id by part it holds
  std::set<int64_t> unusable_;                 // checkpoints that workers could not load
  double assigned_at_ = 0.0;                   // or when all were told to go over to it
  int64_t resume_step_ = 0;
  int64_t loaded_step_ = 0;      // of the checkpoint that the newest assignment names, 0: none
  int64_t checkpoint_step_ = 0;  // newest whole one
  TokenHistory tokens_;          // up to resume_step_
  DatasetFacts dataset_;
  RendezvousStore store_;
  std::optional<Training> training_;  // of the newest generation that has begun to train

  bool restored_ = false;  // by restore()
  bool anybody_back_ = false;
  bool dirty_ = false;  // what restore() needs has changed
  std::optional<Preparing> preparing_;
  bool changing_ = false;  // the generation that trains goes over to the newest one by itself
  int64_t commits_seen_ = 0;
  double trained_seen_ = 0.0;
  std::string halt_reason_;
  // Who lost a connection, with what it said, and whether that alone broke the generation off.
  std::map<std::string, std::string> lost_links_;
  bool links_alone_ = false;
  double halted_at_ = 0.0;
  int fruitless_ = 0;                 // halts since the last commit
  int lost_in_row_ = 0;               // workers since the last commit
  std::vector<std::string> awaited_;  // who has yet to answer Halt, and maybe more
  std::map<std::string, std::vector<HeldPiece>> held_;  // of those who answered Halt, by id
  std::map<std::string, double> leaving_by_;            // id of a dismissed member → deadline
  std::optional<std::string> stop_reason_;              // of a stop asked for meanwhile
  double too_few_since_ = 0.0;                          // kJoining again, or paused
  PauseClock pauses_;
  Stragglers stragglers_;

  double started_;
  double now_ = 0.0;  // of the call in progress
  double looked_;     // when tick() last looked at all members
  double next_beat_;
  double next_keep_ = 0.0;  // what is kept for restore() is not written before
  double next_tick_;
  std::optional<Suspicion> suspicion_;
  std::optional<Outcome> outcome_;
  double ending_since_ = 0.0;
  std::map<std::string, double> watchers_;  // peers that ask for Status → when they last did
};

}  // namespace muster
