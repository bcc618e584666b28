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
  say(envelope);
}

void Worker::on_message(const proto::Envelope& envelope) {
  switch (envelope.body_case()) {
    case proto::Envelope::kAssignment:
      return on_assignment(envelope.assignment());
    case proto::Envelope::kStepPlan:
      return on_plan(envelope.step_plan());
    case proto::Envelope::kGoOver:
      return on_go_over(envelope.go_over());
    case proto::Envelope::kHalt:
      return on_halt(envelope.halt());
    case proto::Envelope::kStop:
      expect_end();
      return end({false, envelope.stop().ok() ? 0 : 1});
    case proto::Envelope::kCheckpointResult:
      if (envelope.checkpoint_result().committed()) {
        saved_ = std::max(saved_, envelope.checkpoint_result().step());
      }
      return;
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
  pending_ = cluster_.roster(assigned_);
  const auto place = static_cast<int>(pending_->places.at(this));
  const std::string& data = assignment.nodes(assignment.members(place).node()).data_endpoint();
  if (!data.empty()) endpoint_ = data;
  if (assignment.prepare()) return prepare();
  resume_step_ = assignment.resume_step();
  later(kReactionS, [this] { next(); });
}

// In the background, whatever becomes of the steps meanwhile.
void Worker::prepare() {
  resume_step_ = -1;
  const auto say_so = [this, generation = assigned_](bool complete, bool crowded) {
    if (generation != assigned_) return;
    proto::Envelope envelope;
    envelope.mutable_prepared()->set_generation(generation);
    envelope.mutable_prepared()->set_complete(complete);
    envelope.mutable_prepared()->set_crowded(crowded);
    say(envelope);
  };
  const double takes_s = cluster_.dice().uniform(0.0, cluster_.options().times.prepare_s);
  if (!place_ && cluster_.dice().chance(cluster_.options().times.failing_share)) {
    disturb();  // in the end it is sent away for it
    return later(takes_s, [this] { fail("a peer cannot be reached"); });
  }
  const bool crowded = cluster_.dice().chance(cluster_.options().times.crowded_share);
  after(takes_s, [say_so, crowded] { say_so(!crowded, crowded); });
}

void Worker::on_go_over(const proto::GoOver& word) {
  if (!pending_ || word.generation() != pending_->assignment().generation()) return;
  resume_step_ = word.resume_step();
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
  // What a newcomer loads meanwhile is loaded to its end.
  const bool loads = !place_ && pending_ && pending_->assignment().prepare();
  const Times& times = cluster_.options().times;
  if (pending_ && pending_->assignment().generation() <= halt.generation()) pending_.reset();
  place_.reset();
  busy_ = needs_data_ = false;
  set_state(State::kIdle);
  after(cluster_.dice().uniform(0.0, loads ? times.prepare_s : times.abort_s), [this, halt] {
    proto::Envelope envelope;
    envelope.mutable_halted()->set_generation(halt.generation());
    vault_.list(envelope.mutable_halted());
    say(envelope);
  });
}

void Worker::fail(const std::string& error) {
  ++epoch_;
  const uint64_t generation = pending_ && (state_ == State::kMoving || !place_)
                                  ? pending_->assignment().generation()
                                  : this->generation();
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
  say(envelope);
}

void Worker::operate(MeshKind kind, const std::string& name, const Participants& participants,
                     size_t index, double duration_s, Contribution contribution,
                     std::function<void(const Gathered&)> then) {
  const uint64_t generation = state_ == State::kMoving && pending_
                                  ? pending_->assignment().generation()
                                  : this->generation();
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
  const bool may_begin = pending_ && resume_step_ >= 0;
  if (state_ == State::kIdle && may_begin) return go_over();
  if (state_ != State::kTraining || busy_) return;
  while (!planned_.empty() && planned_.front().first < place_->generation) planned_.pop_front();
  if (!planned_.empty() && planned_.front().first == place_->generation) {
    const proto::PlannedStep step = std::move(planned_.front().second);
    planned_.pop_front();
    return begin(step);
  }
  if (may_begin) go_over();
}

void Worker::go_over() {
  const auto roster = pending_;
  const proto::Assignment& assignment = roster->assignment();
  if (place_ && assignment.has_handover() &&
      assignment.handover().generation() == place_->generation) {
    cluster_.require(place_->step == resume_step_,
                     fmt::format("{} is at step {} and is to hand over step {}", id(), place_->step,
                                 resume_step_));
    vault_.put(piece(place_->part), place_->history);
  }
  place_.reset();
  ++epoch_;
  set_state(State::kMoving);
  if (assignment.has_handover()) {
    exchange(roster);
  } else {
    load(roster);
  }
}

void Worker::exchange(const std::shared_ptr<const Roster>& roster) {
  const proto::Assignment& assignment = roster->assignment();
  const proto::Handover& handover = assignment.handover();
  const int parts = handover.holders_size();
  const size_t index = roster->places.at(this);
  const uint64_t state = cluster_.history(resume_step_);
  Contribution mine;
  for (int part = 0; part < parts; ++part) {
    if (static_cast<size_t>(handover.holders(part)) != index) continue;
    const auto history = vault_.find({handover.generation(), parts, part, resume_step_});
    cluster_.require(history == state,
                     fmt::format("{} does not have part {} of the state of step {}, of generation "
                                 "{}",
                                 id(), part, resume_step_, handover.generation()));
    mine.pieces.emplace_back(part, *history);
  }
  operate(MeshKind::kHandover, "exchange", roster->participants, index,
          cluster_.exchange_s(*roster), std::move(mine), [=, this](const Gathered& gathered) {
            cluster_.require(static_cast<int>(gathered.pieces.size()) == parts,
                             fmt::format("parts are missing in the handover to generation {}",
                                         roster->assignment().generation()));
            enter(roster, state);
          });
}

void Worker::load(const std::shared_ptr<const Roster>& roster) {
  later(cluster_.options().times.load_s, [this, roster] {
    const proto::Assignment& assignment = roster->assignment();
    enter(roster,
          assignment.resume_step() == 0 ? kSeedHistory : cluster_.load_checkpoint(assignment));
  });
}

void Worker::enter(const std::shared_ptr<const Roster>& roster, uint64_t history) {
  const int rank = roster->rank_of(*this);
  if (rank < 0) {
    if (pending_ == roster) pending_.reset();
    return set_state(State::kGivenUp);
  }
  operate(MeshKind::kTrain, "connect", roster->members, static_cast<size_t>(rank),
          cluster_.options().times.connect_s, {}, [this, roster, rank, history](const Gathered&) {
            const proto::Assignment& assignment = roster->assignment();
            const int world = assignment.world_size();
            place_ = Place{.generation = assignment.generation(),
                           .roster = roster,
                           .rank = rank,
                           .world = world,
                           .part = part_of(rank, world),
                           .step = resume_step_,
                           .history = history,
                           .begin = resume_step_,
                           .memory_at = cluster_.now()};
            const double memory_s = cluster_.options().times.mirror_memory_s;
            sending_ = 0;
            if (memory_s > 0) place_->memory_at += cluster_.dice().uniform(0.0, memory_s);
            if (pending_ == roster) pending_.reset();
            set_state(State::kTraining);
            proto::Envelope envelope;
            envelope.mutable_ready()->set_generation(place_->generation);
            envelope.mutable_ready()->set_part(place_->part);
            envelope.mutable_ready()->set_mirror_ready(mirror_ready());
            say(envelope);
            next();
          });
}

}  // namespace muster::simulation
