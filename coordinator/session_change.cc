// The part of Session that changes generations: who comes, leaves and is lost, and from which state
// training goes on.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "common/error.h"
#include "common/logging.h"
#include "coordinator/session.h"

namespace muster {

namespace {

// Generations that break off one after the other, with no step in between and nobody lost: then
// something is wrong that another try does not mend.
constexpr int kMostFruitless = 5;
// The same of workers that are lost, at least; a crash that every try repeats is to end.
constexpr int kMostLost = 16;

}  // namespace

bool Session::assigned_member(const std::string& id) const {
  return std::find(assigned_.begin(), assigned_.end(), id) != assigned_.end();
}

std::vector<Member*> Session::holders() {
  std::vector<Member*> found;
  for (Member& member : state_.members) {
    if (member.role == MemberRole::kWorker && member.assigned &&
        member.state != MemberState::kGone) {
      found.push_back(&member);
    }
  }
  return found;
}

// Planned changes, and what has a time limit in them.
void Session::watch_changes(double now) {
  if (phase_ == Phase::kTraining) {
    promote(now, &state_);
    consider_resize(now);
  }
  // One that trains nothing holds its state on disk instead of twice.
  if (phase_ == Phase::kTraining && training_->paused() && training_->finished()) {
    release_leavers(now);
  }
  if (phase_ == Phase::kTraining && training_->paused() &&
      now - too_few_since_ > options_.wait_timeout_s) {
    fault(fmt::format("{}, and no more came within elastic.wait_timeout_s = {:.1f} s", waiting_for_,
                      options_.wait_timeout_s),
          now);
  }
  if (phase_ == Phase::kHalting && now - halted_at_ > config_.elastic.collective_timeout_s) {
    for (Member* member : holders()) {
      if (held_.contains(member->id) || outcome_) continue;
      lose(member, describe(*member) + " did not leave the generation that broke off", now);
    }
  }
  for (auto& [id, deadline] : leaving_by_) {
    if (now < deadline) continue;
    deadline = std::numeric_limits<double>::infinity();
    kill(*find_member(id), "it did not leave in time");
  }
  dismiss_empty_nodes(now);
}

void Session::consider_resize(double now) {
  if (training_->ending() || training_->leaving()) return;
  const auto reason = decide_resize(now, state_, options_);
  if (!reason) return;
  const int world = allowed_world(available_workers(state_), state_, options_);
  if (world == 0 || (world < options_.min_workers && options_.wait_timeout_s == 0)) {
    // Those who leave take the run along.
    return request_stop(*reason, false, now);
  }
  changing_ = true;
  resume_step_ = training_->close();
  assign(Recovery{training_->generation(), resume_step_, parts_},
         fmt::format("from step {} in memory: {}", resume_step_, *reason), now);
}

void Session::after_commits(double now) {
  if (!training_) return;
  if (training_->committed() > commits_seen_) {
    pauses_.commit(now, training_->trained_s() - trained_seen_);
    commits_seen_ = training_->committed();
    trained_seen_ = training_->trained_s();
    fruitless_ = 0;
    lost_in_row_ = 0;
    if (phase_ == Phase::kTraining || phase_ == Phase::kStopping) release_leavers(now);
  }
  if (changing_) start_training(now);
}

void Session::watch_speed(const Member& member, const proto::StepReport& report) {
  if (report.generation() != training_->generation()) return;
  const auto news =
      stragglers_.add(member.id, report.step(), {report.step_s(), report.comm_wait_s()});
  for (const Straggler& slow : news) {
    Member* found = find_member(slow.member_id);
    const std::string reason = fmt::format(
        "{} computed for {:.3g} s a step, {:.1f} times the others' {:.3g} s, {} steps "
        "in a row",
        describe(*found), slow.own_s, slow.own_s / slow.median_s, slow.median_s,
        config_.elastic.straggler_steps);
    event("straggler", reason);
    const bool others_suffice = available_workers(state_) > options_.min_workers;
    if (config_.elastic.straggler_drain && others_suffice) drain(found, reason);
  }
}

// Whoever has handed its state over may go once the new generation holds it twice.
void Session::release_leavers(double now) {
  for (Member& member : state_.members) {
    if (member.role == MemberRole::kWorker && member.state == MemberState::kDraining &&
        member.rank < 0) {
      dismiss(&member, "left the run as it was asked to", /*ok=*/true, now);
    }
  }
}

void Session::dismiss(Member* member, const std::string& reason, bool ok, double now) {
  proto::Envelope envelope;
  envelope.mutable_stop()->set_ok(ok);
  envelope.mutable_stop()->set_reason(reason);
  send_to(*member, std::move(envelope));
  event("member_left", fmt::format("{}: {}", describe(*member), reason));
  member->state = MemberState::kGone;
  leaving_by_[member->id] = now + config_.elastic.shutdown_timeout_s;
}

void Session::dismiss_empty_nodes(double now) {
  for (Member& agent : state_.members) {
    if (agent.role != MemberRole::kNode || agent.state != MemberState::kDraining) continue;
    const bool busy =
        std::any_of(state_.members.begin(), state_.members.end(), [&](const Member& member) {
          return member.role == MemberRole::kWorker && member.node_id == agent.node_id &&
                 (member.state != MemberState::kGone || leaving_by_.contains(member.id));
        });
    if (busy) continue;
    for (Member& member : state_.members) {
      if (member.node_id == agent.node_id && member.role == MemberRole::kData &&
          member.state != MemberState::kGone) {
        dismiss(&member, "its node leaves the run", /*ok=*/true, now);
      }
    }
    dismiss(&agent, "its workers have left the run", /*ok=*/true, now);
  }
}

void Session::kill(const Member& member, const std::string& reason) {
  for (const Member& agent : state_.members) {
    if (agent.role != MemberRole::kNode || agent.node_id != member.node_id ||
        agent.state == MemberState::kGone || agent.id == member.id) {
      continue;
    }
    proto::Envelope envelope;
    envelope.mutable_end_process()->set_member_id(member.id);
    envelope.mutable_end_process()->set_reason(reason);
    send_to(agent, std::move(envelope));
  }
}

void Session::lose(Member* member, const std::string& reason, double now) {
  if (!state_.running) return fault(reason, now);
  if (member->role == MemberRole::kWorker) {
    // Still a member when the run ends for it: it is told, and its agent that it does not answer.
    const MemberState before = std::exchange(member->state, MemberState::kGone);
    const bool over = ends_without(state_, options_);
    member->state = before;
    if (over) return fault(reason, now);
  }
  kill(*member, reason);
  switch (member->role) {
    case MemberRole::kNode:
      return lose_node(member, reason, now);
    case MemberRole::kData:
      return lose_data(member, reason, config_.elastic.restarts > 0, now);
    default:
      return lose_worker(member, reason, now);
  }
}

void Session::lose_worker(Member* member, const std::string& reason, double now) {
  if (member->state == MemberState::kGone) return;
  const bool training =
      training_ && (phase_ != Phase::kStarting || changing_) && training_->rank_of(member->id) >= 0;
  const bool involved = assigned_member(member->id) || training ||
                        (phase_ == Phase::kStarting && participants_.contains(member->id)) ||
                        (phase_ == Phase::kHalting && member->assigned);
  member->state = MemberState::kGone;
  if (!involved) return event("worker_lost", reason);
  if (ends_without(state_, options_)) return fault(reason, now);
  event("worker_lost", reason);
  fruitless_ = 0;
  if (++lost_in_row_ > std::max(kMostLost, 2 * static_cast<int>(assigned_.size()))) {
    return fault(fmt::format("{} workers were lost one after the other, and no step was committed "
                             "in between: the last, {}",
                             lost_in_row_, reason),
                 now);
  }
  halt(reason, now);
}

void Session::lose_data(Member* member, const std::string& reason, bool replaced, double now) {
  member->state = MemberState::kGone;
  std::erase_if(state_.datasets,
                [&](const NodeDataset& dataset) { return dataset.node_id == member->node_id; });
  if (replaced) return event("data_service_lost", reason);
  // Its workers cannot train any more; what they hold can still be handed over.
  bool any = false;
  for (Member& worker : state_.members) {
    if (worker.role != MemberRole::kWorker || worker.node_id != member->node_id ||
        worker.state == MemberState::kGone) {
      continue;
    }
    worker.state = MemberState::kDraining;
    any = any || worker.assigned;
  }
  if (ends_without(state_, options_)) return fault(reason, now);
  event("data_service_lost", reason);
  if (any) halt(reason, now);
}

void Session::lose_node(Member* agent, const std::string& reason, double now) {
  // Its processes died with it, or cannot be told from such: whoever comes back is turned away.
  std::vector<Member*> workers;
  agent->state = MemberState::kGone;
  for (Member& member : state_.members) {
    if (member.node_id != agent->node_id || member.state == MemberState::kGone) continue;
    if (member.role == MemberRole::kWorker) {
      workers.push_back(&member);
    } else {
      member.state = MemberState::kGone;
    }
  }
  std::erase_if(state_.datasets,
                [&](const NodeDataset& dataset) { return dataset.node_id == agent->node_id; });
  event("node_lost", reason);
  // All at once, so that nobody is waited for in vain.
  std::vector<Member*> involved;
  for (Member* worker : workers) {
    if (worker->assigned) involved.push_back(worker);
    if (!worker->assigned) worker->state = MemberState::kGone;
  }
  for (Member* worker : involved) {
    if (!outcome_) lose_worker(worker, reason, now);
  }
}

void Session::halt(const std::string& reason, double now) {
  if (outcome_) return;
  if (phase_ == Phase::kHalting) return finish_halt(now);
  if (++fruitless_ > kMostFruitless) return fault(reason, now);
  if (phase_ == Phase::kStopping) stop_reason_ = training_->leave_reason();
  phase_ = Phase::kHalting;
  changing_ = false;
  halt_reason_ = reason;
  halted_at_ = now;
  held_.clear();
  event("halt", reason);
  for (const Member* member : holders()) send_halt(*member);
  finish_halt(now);
}

void Session::send_halt(const Member& member) {
  proto::Envelope envelope;
  envelope.mutable_halt()->set_generation(generation_);
  envelope.mutable_halt()->set_reason(halt_reason_);
  send_or_suspect(member.id, std::move(envelope));
}

void Session::on_halted(const Member& member, const proto::Halted& halted, double now) {
  if (phase_ != Phase::kHalting || halted.generation() != generation_) return;
  std::vector<HeldPiece>& pieces = held_[member.id];
  pieces.clear();
  for (const proto::Piece& piece : halted.pieces()) {
    pieces.push_back(
        {member.id, piece.generation(), piece.world_size(), piece.part(), piece.step()});
  }
  finish_halt(now);
}

void Session::finish_halt(double now) {
  for (const Member* member : holders()) {
    if (!held_.contains(member->id)) return;
  }
  promote(now, &state_);
  go_on(halt_reason_, now);
}

// From the newest state that is whole in memory; else from the newest checkpoint.
void Session::go_on(const std::string& reason, double now) {
  std::vector<HeldPiece> pieces;
  for (const Member* member : holders()) {
    const auto found = held_.find(member->id);
    if (found == held_.end()) continue;
    pieces.insert(pieces.end(), found->second.begin(), found->second.end());
  }
  auto recovery = choose_recovery(pieces);
  const int64_t in_memory = recovery ? recovery->step : -1;
  const int64_t before = committed();
  if (training_) {
    training_->break_off(in_memory >= 0 ? in_memory : before, now);
    checkpoint_step_ = std::max(checkpoint_step_, training_->checkpoint_step());
    tokens_ = training_->token_history();
    commits_seen_ = training_->committed();
  }
  // What is on disk for good may be newer than what is left in memory.
  const bool saved = in_memory >= 0 && in_memory < checkpoint_step_;
  if (saved) recovery.reset();
  if (!recovery) {
    if (before > 0 && !saved) {
      event("state_lost",
            fmt::format("part of the state of step {} was lost with all its copies in memory: "
                        "training goes back to {}",
                        before,
                        checkpoint_step_ > 0
                            ? fmt::format("the checkpoint of step {}", checkpoint_step_)
                            : "the seed, as there is no checkpoint (checkpoint.every)"));
    }
    begin_generation(reason, now);
  } else {
    resume_step_ = in_memory;
    if (!tokens_.contains(resume_step_)) {
      tokens_[resume_step_] = tokens_.empty() ? 0 : std::prev(tokens_.end())->second;
    }
    tokens_.erase(tokens_.upper_bound(resume_step_), tokens_.end());
    assign(recovery, fmt::format("from step {} in memory: {}", resume_step_, reason), now);
  }
  // Where nobody is left this is decided anew once somebody is.
  if (!outcome_ && phase_ == Phase::kStarting && resume_step_ < before) {
    const double step_s = training_ ? training_->metrics().step_s : 0.0;
    pauses_.redo(before - resume_step_, step_s * static_cast<double>(before - resume_step_));
    event("steps_redone", fmt::format("steps {} to {} are done again", resume_step_ + 1, before));
  }
}

void Session::wait_for_workers(const std::string& reason, double now) {
  if (restored_ && !anybody_back_) return begin_anew(now);
  phase_ = Phase::kJoining;
  too_few_since_ = now;
  waiting_for_.clear();
  event("waiting", "no worker is left: " + reason);
}

void Session::drain(Member* member, const std::string& reason) {
  if (member->state == MemberState::kGone || member->state == MemberState::kDraining) return;
  event("draining", reason);
  const bool whole_node = member->role != MemberRole::kWorker;
  for (Member& other : state_.members) {
    if (other.state == MemberState::kGone) continue;
    const bool concerned = &other == member ||
                           (whole_node && other.node_id == member->node_id &&
                            (other.role == MemberRole::kWorker || other.role == MemberRole::kNode));
    if (!concerned || other.role == MemberRole::kData) continue;
    // One that is in no generation has nothing to hand over.
    if (other.role == MemberRole::kWorker && !other.assigned) {
      dismiss(&other, reason, /*ok=*/true, now_);
    } else {
      other.state = MemberState::kDraining;
    }
  }
}

std::string Session::drain(const std::string& who, const std::string& reason, double now) {
  now_ = now;
  if (!state_.running || outcome_) throw ConfigError("the run does not train");
  std::vector<Member*> found;
  for (Member& member : state_.members) {
    if (member.state == MemberState::kGone || member.role == MemberRole::kObserver) continue;
    const bool rank = member.role == MemberRole::kWorker && member.rank >= 0 &&
                      std::to_string(member.rank) == who;
    const bool host = member.role == MemberRole::kNode && member.host == who;
    if (member.id == who || rank || host) found.push_back(&member);
  }
  if (found.empty()) {
    throw ConfigError(fmt::format(
        "{} is no worker's rank, no member's id and no host of the run: see `muster status`", who));
  }
  // The target is what is left, or others would be started in their place.
  const auto workers = [&] { return available_workers(state_); };
  const int before = workers();
  std::string what;
  for (Member* member : found) {
    what += (what.empty() ? "" : ", ") + describe(*member);
    drain(member,
          fmt::format("{}: {}", describe(*member), reason.empty() ? "muster drain" : reason));
  }
  if (state_.target_workers > 0) {
    state_.target_workers =
        std::max(options_.min_workers, state_.target_workers - (before - workers()));
  }
  return what;
}

std::string Session::scale(int workers, double now) {
  now_ = now;
  if (outcome_) throw ConfigError("the run is over");
  if (workers < options_.min_workers) {
    throw ConfigError(fmt::format("{} workers are fewer than elastic.min_workers = {}", workers,
                                  options_.min_workers));
  }
  state_.target_workers = 0;
  if (const int most = allowed_world(workers, state_, options_); most != workers) {
    throw ConfigError(fmt::format(
        "the run cannot have {} workers; {} would do (train.global_batch, elastic.max_workers, "
        "parallel.shard_group)",
        workers, most));
  }
  state_.target_workers = workers;
  // The youngest go.
  std::vector<Member*> here;
  for (Member& member : state_.members) {
    if (member.role == MemberRole::kWorker &&
        (member.state == MemberState::kActive || member.state == MemberState::kStandby ||
         member.state == MemberState::kJoining)) {
      here.push_back(&member);
    }
  }
  std::sort(here.begin(), here.end(),
            [](const Member* a, const Member* b) { return a->arrival < b->arrival; });
  const int count = static_cast<int>(here.size());
  for (int i = workers; i < count; ++i) {
    drain(here[static_cast<size_t>(i)],
          fmt::format("{}: the run is to have {} workers", describe(*here[static_cast<size_t>(i)]),
                      workers));
  }
  if (count < workers) start_workers(workers - count);
  return fmt::format("from {} to {} workers", count, workers);
}

// Spread over the nodes, the emptiest first.
void Session::start_workers(int count) {
  std::map<std::string, int> on_node;  // agent's id
  for (const Member& member : state_.members) {
    if (member.role == MemberRole::kNode && member.state == MemberState::kActive) {
      on_node.emplace(member.id, 0);
    }
  }
  if (on_node.empty()) throw ConfigError("no node is there to start workers on");
  for (const Member& member : state_.members) {
    if (member.role == MemberRole::kWorker && member.state != MemberState::kGone &&
        on_node.contains(member.node_id)) {
      ++on_node[member.node_id];
    }
  }
  std::map<std::string, int> more;
  for (int i = 0; i < count; ++i) {
    const auto emptiest =
        std::min_element(on_node.begin(), on_node.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; });
    ++emptiest->second;
    ++more[emptiest->first];
  }
  for (const auto& [agent, workers] : more) {
    proto::Envelope envelope;
    envelope.mutable_start_workers()->set_count(workers);
    send_to(*find_member(agent), std::move(envelope));
  }
}

}  // namespace muster
