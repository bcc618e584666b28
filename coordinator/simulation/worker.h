// A simulated worker: follows the worker's side of the protocol (muster.proto) to the letter, with
// a hash chain of steps and samples (history.h) in the place of tensors.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "coordinator/simulation/collectives.h"
#include "coordinator/simulation/process.h"
#include "coordinator/simulation/vault.h"

namespace muster::simulation {

// An assignment, and the processes that it lists; the same for all.
struct Roster {
  explicit Roster(Message sent) : message(std::move(sent)) {}
  const proto::Assignment& assignment() const { return message.envelope().assignment(); }
  // -1: only hands over.
  int rank_of(const Process& process) const {
    const size_t place = places.at(&process);
    return place < members->size() ? static_cast<int>(place) : -1;
  }

  const Message message;
  Participants members;
  Participants participants;  // of the handover: the members first
  std::unordered_map<const Process*, size_t> places;
  int mirror_shift = 0;  // rank r is mirrored by rank r + this; 0: nobody
};

// On another node where there is one. Pure. 0: nobody.
int mirror_shift(const std::vector<Process*>& members);

class Worker : public Process {
 public:
  enum class State {
    kIdle,      // waits for an assignment, with what its vault holds
    kMoving,    // on its way into a generation
    kTraining,  // in a generation, whether there is a step to train or not
    kFailed,    // a collective broke: waits for Halt
    kGivenUp,   // handed its state over: waits for Stop
    kDone,      // the last step is saved
  };

  using Process::Process;

  // SIGTERM: asks the coordinator to let it leave.
  void ask_to_leave(const std::string& reason);

  State state() const { return state_; }
  double state_since() const { return state_since_; }
  // Of the generation that it is in; 0: none.
  uint64_t generation() const { return place_ ? place_->generation : 0; }
  int64_t step() const { return place_ ? place_->step : -1; }
  bool has_endpoint() const { return !endpoint_.empty(); }

 protected:
  void on_message(const proto::Envelope& envelope) override;
  void fill(proto::Hello* hello) const override { hello->set_device("cpu"); }

 private:
  // Where it is in a generation, and the state that it has there.
  struct Place {
    uint64_t generation = 0;
    std::shared_ptr<const Roster> roster;
    int rank = 0;
    int world = 1;
    int part = 0;
    int64_t step = 0;
    uint64_t history = 0;
    int64_t begin = 0;                     // the step that it began from
    double memory_at = 0.0;                // when there is memory for mirrors
    bool secured = false;                  // nobody goes back behind its begin
    std::optional<int64_t> mirrored = {};  // newest step whose state is whole here
  };

  void set_state(State state);
  void on_assignment(const proto::Assignment& assignment);
  void on_halt(const proto::Halt& halt);
  void on_plan(const proto::StepPlan& plan);
  void on_go_over(const proto::GoOver& word);
  void prepare();
  void go_over();
  void exchange(const std::shared_ptr<const Roster>& roster);
  void load(const std::shared_ptr<const Roster>& roster);
  void enter(const std::shared_ptr<const Roster>& roster, uint64_t history);
  void fail(const std::string& error);
  // The present generation's operations; a failure of one fails the worker.
  void operate(MeshKind kind, const std::string& name, const Participants& participants,
               size_t index, double duration_s, Contribution contribution,
               std::function<void(const Gathered&)> then);
  void later(double delay, std::function<void()> call);

  void next();
  void begin(const proto::PlannedStep& step);
  void wait_for_data(const proto::PlannedStep& step);
  void pass(const proto::PlannedStep& step);
  void mirror(const proto::PlannedStep& step);
  void part_done(const proto::PlannedStep& step);
  void update(const proto::PlannedStep& step);
  void report(const proto::PlannedStep& step);
  void after_report(const proto::PlannedStep& step);
  void save(const proto::PlannedStep& step);
  void end_step(const proto::PlannedStep& step);
  PieceKey piece(int part) const;
  void let_go_of(const proto::PlannedStep& step);
  bool mirror_ready() const;

  State state_ = State::kIdle;
  double state_since_ = 0.0;
  uint64_t epoch_ = 0;  // of what was begun: what an older one had asked for is forgotten
  std::optional<Place> place_;
  uint64_t assigned_ = 0;  // newest generation that it was assigned to
  std::shared_ptr<const Roster> pending_;
  int64_t resume_step_ = -1;  // of pending_, where that may begin; -1: it may not yet
  std::deque<std::pair<uint64_t, proto::PlannedStep>> planned_;
  bool busy_ = false;       // with a step
  int missing_ = 0;         // parts of the step under way that have to end before its update
  int sending_ = 0;         // of the newest mirror: what has yet to be sent and received
  uint64_t gradients_ = 0;  // of the step under way: the hash of its samples
  bool needs_data_ = false;
  double data_deadline_ = 0.0;
  std::string endpoint_;
  Vault vault_;
  int64_t saved_ = 0;  // newest checkpoint that it was told of
};

}  // namespace muster::simulation
