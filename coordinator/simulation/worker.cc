#include "coordinator/simulation/worker.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "common/hash.h"
#include "coordinator/simulation/cluster.h"
#include "coordinator/simulation/history.h"

namespace muster::simulation {

namespace {

// How soon after its reason a worker does what it does at once.
constexpr double kReactionS = 0.002;

// Which part of the layout a rank holds. Not the rank itself, as with parallel.shard_group.
int part_of(int rank, int world) {
  return world - 1 - rank;
}

}  // namespace

int mirror_shift(const std::vector<Process*>& members) {
  const int world = static_cast<int>(members.size());
  if (world < 2) return 0;
  std::map<const Agent*, int> on_node;
  int largest = 0;
  for (const Process* member : members) largest = std::max(largest, ++on_node[member->agent()]);
  return largest % world == 0 ? 1 : largest;
}

void Worker::set_state(State state) {
  state_ = state;
  state_since_ = cluster_.now();
}

void Worker::later(double delay, std::function<void()> call) {
  after(delay, [this, mine = epoch_, call = std::move(call)] {
    if (mine == epoch_) call();
  });
}

void Worker::ask_to_leave(const std::string& reason) {
  proto::Envelope envelope;
  envelope.mutable_leaving()->set_reason(reason);
  say(std::move(envelope));
}

void Worker::on_message(const proto::Envelope& envelope) {
  switch (envelope.body_case()) {
    case proto::Envelope::kAssignment:
      return on_assignment(envelope.assignment());
    case proto::Envelope::kStepPlan:
      return on_plan(envelope.step_plan());
    case proto::Envelope::kHalt:
      return on_halt(envelope.halt());
    case proto::Envelope::kStop:
      expect_end();
      return end({false, envelope.stop().ok() ? 0 : 1});
    case proto::Envelope::kDataMoved:
      endpoint_ = envelope.data_moved().endpoint();
      return;
    default:
      return;
  }
}

void Worker::on_assignment(const proto::Assignment& assignment) {
  if (assignment.generation() <= assigned_) return;  // said twice
  assigned_ = assignment.generation();
  pending_ = assignment;
  if (!assignment.data_endpoint().empty()) endpoint_ = assignment.data_endpoint();
  later(kReactionS, [this] { next(); });
}

void Worker::on_plan(const proto::StepPlan& plan) {
  for (const proto::PlannedStep& step : plan.steps()) {
    planned_.emplace_back(plan.generation(), step);
  }
  later(kReactionS, [this] { next(); });
}

void Worker::on_halt(const proto::Halt& halt) {
  ++epoch_;
  for (const uint64_t generation : {place_ ? place_->generation : 0, assigned_}) {
    cluster_.collectives().abort(*this, {generation, MeshKind::kHandover});
    cluster_.collectives().abort(*this, {generation, MeshKind::kTrain});
  }
  std::erase_if(planned_, [&](const auto& step) { return step.first <= halt.generation(); });
  if (pending_ && pending_->generation() <= halt.generation()) pending_.reset();
  place_.reset();
  busy_ = needs_data_ = false;
  set_state(State::kIdle);
  after(cluster_.dice().uniform(0.0, cluster_.options().times.abort_s), [this, halt] {
    proto::Envelope envelope;
    envelope.mutable_halted()->set_generation(halt.generation());
    vault_.list(envelope.mutable_halted());
    say(std::move(envelope));
  });
}

void Worker::fail(const std::string& error) {
  ++epoch_;
  const uint64_t generation =
      pending_ && state_ == State::kMoving ? pending_->generation() : this->generation();
  const int rank = place_ ? place_->rank : -1;
  cluster_.collectives().abort(*this, {generation, MeshKind::kHandover});
  cluster_.collectives().abort(*this, {generation, MeshKind::kTrain});
  busy_ = needs_data_ = false;
  set_state(State::kFailed);
  proto::Envelope envelope;
  proto::WorkerFailed* failed = envelope.mutable_worker_failed();
  failed->set_generation(generation);
  failed->set_rank(rank);
  failed->set_error(error);
  failed->set_peer(true);
  say(std::move(envelope));
}

void Worker::operate(MeshKind kind, const std::string& name, const Participants& participants,
                     size_t index, double duration_s, Contribution contribution,
                     std::function<void(const Gathered&)> then) {
  const uint64_t generation =
      state_ == State::kMoving && pending_ ? pending_->generation() : this->generation();
  cluster_.collectives().arrive(
      *this, {generation, kind}, name, participants, index, duration_s, std::move(contribution),
      [this, mine = epoch_, name, then = std::move(then)](const Gathered* gathered) {
        if (mine != epoch_) return;
        if (gathered == nullptr) return fail("a peer is gone: " + name);
        then(*gathered);
      });
}

PieceKey Worker::piece(int part) const {
  return {place_->generation, place_->world, part, place_->step};
}

// The next thing to do, if it is not busy.
void Worker::next() {
  if (state_ == State::kIdle && pending_) return go_over();
  if (state_ != State::kTraining || busy_) return;
  while (!planned_.empty() && planned_.front().first < place_->generation) planned_.pop_front();
  if (!planned_.empty() && planned_.front().first == place_->generation) {
    const proto::PlannedStep step = std::move(planned_.front().second);
    planned_.pop_front();
    return begin(step);
  }
  if (pending_) go_over();
}

void Worker::go_over() {
  const proto::Assignment& assignment = *pending_;
  if (place_ && assignment.has_handover() &&
      assignment.handover().generation() == place_->generation) {
    cluster_.require(place_->step == assignment.resume_step(),
                     fmt::format("{} is at step {} and is to hand over step {}", id(), place_->step,
                                 assignment.resume_step()));
    vault_.put(piece(place_->part), place_->history);
  }
  place_.reset();
  ++epoch_;
  set_state(State::kMoving);
  if (assignment.has_handover()) {
    exchange(assignment);
  } else {
    load(assignment);
  }
}

void Worker::exchange(const proto::Assignment& assignment) {
  const auto roster = cluster_.roster(assignment.generation());
  const proto::Handover& handover = roster->assignment.handover();
  size_t index = 0;
  while ((*roster->participants)[index] != this) ++index;
  Contribution mine;
  for (int part = 0; part < handover.holders_size(); ++part) {
    if (handover.holders(part) != id()) continue;
    const auto history =
        vault_.find({handover.generation(), handover.world_size(), part, assignment.resume_step()});
    cluster_.require(history.has_value(),
                     fmt::format("{} has no part {} of step {} of generation {}", id(), part,
                                 assignment.resume_step(), handover.generation()));
    mine.pieces.emplace_back(part, *history);
  }
  operate(MeshKind::kHandover, "exchange", roster->participants, index,
          cluster_.exchange_s(roster->assignment), std::move(mine),
          [this](const Gathered& gathered) {
            const proto::Assignment& to = *pending_;
            cluster_.require(
                static_cast<int>(gathered.pieces.size()) == to.handover().world_size(),
                fmt::format("parts are missing in the handover to generation {}", to.generation()));
            for (const auto& [part, history] : gathered.pieces) {
              cluster_.require(history == cluster_.history(to.resume_step()),
                               fmt::format("part {} handed over to generation {} is not the state "
                                           "of step {}",
                                           part, to.generation(), to.resume_step()));
            }
            enter(to, gathered.pieces.begin()->second);
          });
}

void Worker::load(const proto::Assignment& assignment) {
  later(cluster_.options().times.load_s, [this, assignment] {
    if (assignment.resume_step() == 0) return enter(assignment, kSeedHistory);
    enter(assignment, cluster_.load_checkpoint(assignment));
  });
}

void Worker::enter(const proto::Assignment& assignment, uint64_t history) {
  if (assignment.rank() < 0) {
    if (pending_ && pending_->generation() == assignment.generation()) pending_.reset();
    return set_state(State::kGivenUp);
  }
  const auto roster = cluster_.roster(assignment.generation());
  operate(MeshKind::kTrain, "connect", roster->members, static_cast<size_t>(assignment.rank()),
          cluster_.options().times.connect_s, {},
          [this, assignment, roster, history](const Gathered&) {
            place_ = Place{.generation = assignment.generation(),
                           .roster = roster,
                           .rank = assignment.rank(),
                           .world = assignment.world_size(),
                           .part = part_of(assignment.rank(), assignment.world_size()),
                           .step = assignment.resume_step(),
                           .history = history};
            if (pending_ && pending_->generation() == assignment.generation()) pending_.reset();
            set_state(State::kTraining);
            proto::Envelope envelope;
            envelope.mutable_ready()->set_generation(place_->generation);
            envelope.mutable_ready()->set_part(place_->part);
            say(std::move(envelope));
            next();
          });
}

}  // namespace muster::simulation
