// The part of Session that watches over generations, and decides from which state training goes on
// when one broke off.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "common/error.h"
#include "common/logging.h"
#include "coordinator/session.h"

namespace muster {

namespace {

// Generations that break off one after the other, with no step in between and nobody lost: then
// something is wrong that another try does not mend.
constexpr int kMostFruitless = 5;

}  // namespace

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
    if (preparing_) check_preparation(now);
    if (!preparing_ && phase_ == Phase::kTraining) consider_resize(now);
  }
  // One that trains nothing holds its state on disk instead of twice.
  if (phase_ == Phase::kTraining && training_->paused() && training_->finished()) {
    release_leavers(now);
  }
  if (phase_ == Phase::kTraining && training_->paused() && !preparing_ &&
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

void Session::after_commits(double now) {
  if (!training_) return;
  if (training_->committed() > commits_seen_) {
    pauses_.commit(now, training_->trained_s() - trained_seen_);
    commits_seen_ = training_->committed();
    trained_seen_ = training_->trained_s();
    fruitless_ = 0;
    lost_in_row_ = 0;
    // Where there is no memory for mirrors, leavers do not wait for them: whoever sent them away,
    // such as Slurm, kills them after half a minute.
    constexpr double kLeaversPatience = 15.0;
    const bool long_enough =
        now - assigned_at_ > std::min(kLeaversPatience, options_.join_timeout_s);
    const bool at_work = phase_ == Phase::kTraining || phase_ == Phase::kStopping;
    if (at_work && (training_->secured() || long_enough)) release_leavers(now);
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

void Session::on_worker_failed(const Member& member, const proto::WorkerFailed& failed,
                               double now) {
  const std::string reason = fmt::format("{} failed: {}", describe(member), failed.error());
  const bool trains = changing_ || phase_ == Phase::kTraining || phase_ == Phase::kStopping;
  if ((trains || phase_ == Phase::kStarting) && !takes_part(member)) {
    return newcomer_failed(find_member(member.id), failed, reason, now);
  }
  const bool current = (phase_ == Phase::kStarting && failed.generation() == generation_) ||
                       (trains && failed.generation() == training_->generation());
  if (failed.peer() && (current || phase_ == Phase::kHalting)) {
    if (phase_ != Phase::kHalting) {
      links_alone_ = true;
      lost_links_.clear();
    }
    lost_links_[member.id] = reason;
    if (current) halt(reason, now);
    return;
  }
  if (failed.peer() && failed.generation() < generation_) {
    // It has waited for others in a generation that they have left long ago.
    return send_or_suspect(member.id, halt_message(failed.generation(), reason));
  }
  if (failed.device()) return lose(find_member(member.id), reason, now);
  suspect({.member_id = member.id, .reason = reason, .since = now, .secondary = failed.peer()});
}

void Session::halt(const std::string& reason, double now) {
  if (outcome_) return;
  if (phase_ == Phase::kHalting) return finish_halt(now);
  if (++fruitless_ > kMostFruitless) return fault(reason, now);
  if (phase_ == Phase::kStopping) stop_reason_ = training_->leave_reason();
  phase_ = Phase::kHalting;
  call_off(reason);
  changing_ = false;
  halt_reason_ = reason;
  halted_at_ = now;
  event("halt", reason);
  await_holders();
  const Message message = halt_message(generation_, reason);
  for (const std::string& id : awaited_) send_or_suspect(id, message);
  finish_halt(now);
}

void Session::await_holders() {
  held_.clear();
  awaited_.clear();
  for (const Member* member : holders()) awaited_.push_back(member->id);
}

Message Session::halt_message(uint64_t generation, const std::string& reason) {
  proto::Envelope envelope;
  envelope.mutable_halt()->set_generation(generation);
  envelope.mutable_halt()->set_reason(reason);
  return envelope;
}

void Session::on_halted(Member* member, const proto::Halted& halted, double now) {
  if (std::exchange(member->away, false)) look_soon();
  if (phase_ != Phase::kHalting || halted.generation() != generation_) return;
  std::vector<HeldPiece>& pieces = held_[member->id];
  pieces.clear();
  for (const proto::Piece& piece : halted.pieces()) {
    pieces.push_back(
        {member->id, piece.generation(), piece.world_size(), piece.part(), piece.step()});
  }
  finish_halt(now);
}

void Session::finish_halt(double now) {
  // Who has answered or is gone stays so: each is passed once.
  for (; !awaited_.empty(); awaited_.pop_back()) {
    const Member* member = find_member(awaited_.back());
    if (member->state != MemberState::kGone && !held_.contains(member->id)) return;
  }
  promote(now, &state_);
  go_on(halt_reason_, now);
}

// From the newest state that is whole in memory; else from the newest checkpoint.
void Session::go_on(const std::string& reason, double now) {
  if (std::exchange(links_alone_, false)) {
    for (const auto& [id, what] : lost_links_) {
      ++find_member(id)->link_errors;
      event("link_error", what + ", and nobody is lost");
    }
  }
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
    if (before > checkpoint_step_) {
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

}  // namespace muster
