// The part of Session that ends the run: why, who is told, and who is waited for.
#include <fmt/format.h>

#include "coordinator/listing.h"
#include "coordinator/session.h"

namespace muster {

namespace {

// An observer that has not asked for this long is not waited for.
constexpr double kWatcherS = 2.0;

}  // namespace

std::string Session::resume_hint() const {
  if (!state_.running) return "";
  const int64_t step = training_ ? training_->checkpoint_step() : checkpoint_step_;
  if (step == 0) {
    return fmt::format("; there is no checkpoint yet, start again with: {}", resume_command_);
  }
  return fmt::format("; resume from step {} with: {}", step, resume_command_);
}

void Session::fault(const std::string& reason, double now) {
  const std::string where = state_.running ? fmt::format(" at step {}", committed()) : "";
  give_up(reason + where + resume_hint(), now);
}

void Session::give_up(const std::string& reason, double now) {
  if (outcome_) return;
  event("fault", reason);
  end({false, reason}, now);
}

void Session::note_outcome(double now) {
  if (training_ && training_->outcome() && !outcome_) end(*training_->outcome(), now);
}

void Session::end(const Outcome& outcome, double now) {
  outcome_ = outcome;
  ending_since_ = now;
  phase_ = Phase::kEnding;
  next_tick_ = now;
  suspicion_.reset();
  event("end", outcome.reason, now - started_);
  proto::Envelope envelope;
  envelope.mutable_stop()->set_ok(outcome.ok);
  envelope.mutable_stop()->set_reason(outcome.reason);
  // A stopped or hanging process would be waited for in vain; its agent ends it by force.
  const auto waited_for = [&](const Member& member) {
    return member.role != MemberRole::kObserver &&
           (outcome.ok || !is_silent(now, member, options_));
  };
  for (const Member& member : state_.members) {
    if (member.state == MemberState::kGone || member.role == MemberRole::kObserver) continue;
    if (!waited_for(member)) envelope.mutable_stop()->add_silent(member.id);
  }
  const Message stop = envelope;
  for (Member& member : state_.members) {
    if (member.state == MemberState::kGone) continue;
    const bool told = send_to(member, stop) || may_come_back(member);
    member.state = told && waited_for(member) ? MemberState::kDraining : MemberState::kGone;
  }
}

void Session::watch_departures(double now) {
  // A send to a peer whose connection has ended fails: that is how a member's departure shows.
  proto::Envelope envelope;
  envelope.mutable_heartbeat();
  const Message heartbeat = envelope;
  Listing here;
  for (Member& member : state_.members) {
    if (member.state == MemberState::kGone) continue;
    if (send_to(member, heartbeat) || may_come_back(member)) {
      here.add([&] { return describe(member); });
    } else {
      member.state = MemberState::kGone;
    }
  }
  std::erase_if(watchers_, [&](const auto& watcher) {
    return watcher.second < now - kWatcherS || !send_(watcher.first, heartbeat);
  });
  const bool late = now - ending_since_ > config_.elastic.shutdown_timeout_s;
  if (late && !here.empty()) {
    event("shutdown_timeout", fmt::format("these did not leave within {:.0f} s: {}",
                                          config_.elastic.shutdown_timeout_s, here.text()));
  }
  if (late || (here.empty() && watchers_.empty())) phase_ = Phase::kOver;
}

}  // namespace muster
