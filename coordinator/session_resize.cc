// The part of Session that changes the size of a run while it trains. Whoever is in the next
// generation gets ready for it first, while the present one trains on: the coordinator hands steps
// out as ever until all are prepared. Only then is there a last one.
#include <fmt/format.h>

#include <utility>

#include "coordinator/session.h"

namespace muster {

namespace {

// Whoever fails so often to get ready is not tried again.
constexpr int64_t kMostFailures = 3;

}  // namespace

void Session::consider_resize(double now) {
  if (training_->ending() || training_->leaving()) return;
  if (const auto reason = decide_resize(now, state_, options_)) prepare(*reason, now);
}

void Session::prepare(const std::string& reason, double now) {
  const int world = allowed_world(available_workers(state_), state_, options_);
  if (world == 0 || (world < options_.min_workers && options_.wait_timeout_s == 0)) {
    // Those who leave take the run along.
    return request_stop(reason, false, now);
  }
  ++generation_;
  store_.begin_generation(generation_);
  Preparing& next = preparing_.emplace();
  next.members = rank_order(choose_workers(state_, options_), state_);
  next.reason = reason;
  next.since = now;
  proto::Envelope envelope;
  *envelope.mutable_assignment() =
      make_assignment(next.members, Recovery{training_->generation(), 0, parts_}, &next.places);
  envelope.mutable_assignment()->set_prepare(true);
  event("preparing", fmt::format("generation {} of {} workers gets ready: {}", generation_,
                                 next.members.size(), reason));
  keep_for_restore();  // no other may have its number
  send_to_all(next.places, envelope);
}

// A worker that is in the next generation, and not in the one that trains.
bool Session::prepares_only(const Member& member) const {
  return preparing_ && training_->rank_of(member.id) < 0 && preparing_->places.contains(member.id);
}

// Those who train go on as if it had never been; what they have prepared goes with the next
// assignment. The others have to be told.
void Session::call_off(const std::string& reason) {
  if (!preparing_) return;
  event("not_prepared", fmt::format("generation {} is called off: {}", generation_, reason));
  for (const auto& [id, place] : preparing_->places) {
    Member* member = find_member(id);
    if (prepares_only(*member)) dismiss_from_preparation(member, reason);
  }
  preparing_.reset();
}

// It is back once it has answered.
void Session::dismiss_from_preparation(Member* member, const std::string& reason) {
  if (member->state == MemberState::kStandby) member->state = MemberState::kJoining;
  member->away = true;
  send_or_suspect(member->id, halt_message(generation_, reason));
}

void Session::on_prepared(const Member& member, const proto::Prepared& prepared, double now) {
  if (!preparing_ || prepared.generation() != generation_ ||
      !preparing_->places.contains(member.id)) {
    return;
  }
  Preparing& next = *preparing_;
  next.crowded = next.crowded || prepared.crowded();
  bool& complete = next.prepared[member.id];
  if (prepared.complete() && !std::exchange(complete, true)) ++next.complete;
  // Where one has no room its connections, and so the others', come once all have gone over.
  const size_t there = next.crowded ? next.prepared.size() : next.complete;
  if (there == next.places.size()) go_over(now);
}

void Session::go_over(double now) {
  if (training_->ending() || training_->leaving()) return;
  Preparing next = std::move(*preparing_);
  preparing_.reset();
  changing_ = true;
  resume_step_ = training_->close();
  loaded_step_ = 0;
  take_up(std::move(next.members), std::move(next.places),
          fmt::format("from step {} in memory: {}", resume_step_, next.reason), now);
  proto::Envelope envelope;
  envelope.mutable_go_over()->set_generation(generation_);
  envelope.mutable_go_over()->set_resume_step(resume_step_);
  send_to_all(places_, envelope);
}

void Session::check_preparation(double now) {
  for (const std::string& id : preparing_->members) {
    const Member& member = *find_member(id);
    if (member.state == MemberState::kActive || member.state == MemberState::kStandby) continue;
    return call_off(describe(member) + " is lost, or leaves");
  }
  if (now - preparing_->since > options_.join_timeout_s) check_prepared_deadline(now);
}

// The others do not wait for newcomers that hang. Those who train are busy, or fail as they go
// over, which shows.
void Session::check_prepared_deadline(double now) {
  std::vector<Member*> late;
  bool silent = false;  // one of them has not even begun to connect: the others may wait for it
  for (const auto& [id, place] : preparing_->places) {
    Member* member = find_member(id);
    const auto found = preparing_->prepared.find(id);
    const bool prepared =
        found != preparing_->prepared.end() && (found->second || preparing_->crowded);
    if (prepared || !prepares_only(*member)) continue;
    late.push_back(member);
    silent = silent || !preparing_->shown.contains(id);
  }
  if (late.empty()) return go_over(now);
  const std::string reason =
      fmt::format("not prepared within elastic.join_timeout_s = {:.1f} s", options_.join_timeout_s);
  for (Member* member : late) {
    if (silent && preparing_->shown.contains(member->id)) continue;
    lose(member, describe(*member) + ": " + reason, now);
  }
}

// Nobody who trains is concerned. It may have lost another newcomer, and try again.
void Session::newcomer_failed(Member* member, const proto::WorkerFailed& failed,
                              const std::string& reason, double now) {
  if (!failed.peer() || ++member->link_errors > kMostFailures) return lose(member, reason, now);
  event("link_error", reason);
  if (prepares_only(*member) && failed.generation() == generation_) {
    call_off(reason);
  } else {
    dismiss_from_preparation(member, reason);
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

}  // namespace muster
