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
  preparing_ = false;
  if (training_->ending() || training_->leaving()) return;
  const int world = allowed_world(available_workers(state_), state_, options_);
  if (world == 0 || (world < options_.min_workers && options_.wait_timeout_s == 0)) {
    // Those who leave take the run along.
    return request_stop(reason, false, now);
  }
  preparing_ = true;
  crowded_ = false;
  prepared_.clear();
  complete_ = 0;
  assign(Recovery{training_->generation(), 0, parts_},
         fmt::format("once all are prepared: {}", reason), now);
}

// A worker that is in the next generation, and not in the one that trains.
bool Session::prepares_only(const Member& member) const {
  return preparing_ && training_->rank_of(member.id) < 0 && places_.contains(member.id);
}

void Session::on_prepared(const Member& member, const proto::Prepared& prepared, double now) {
  if (!preparing_ || prepared.generation() != generation_ || !places_.contains(member.id)) return;
  crowded_ = crowded_ || prepared.crowded();
  bool& complete = prepared_[member.id];
  if (prepared.complete() && !std::exchange(complete, true)) ++complete_;
  // Where one has no room its connections, and so the others', come once all have gone over.
  if ((crowded_ ? prepared_.size() : complete_) == places_.size()) go_over(now);
}

void Session::go_over(double now) {
  if (training_->ending() || training_->leaving()) return;
  preparing_ = false;
  changing_ = true;
  phase_ = Phase::kStarting;
  resume_step_ = training_->close();
  assigned_at_ = now;
  proto::Envelope envelope;
  envelope.mutable_go_over()->set_generation(generation_);
  envelope.mutable_go_over()->set_resume_step(resume_step_);
  const Message message = envelope;
  for (const auto& [id, place] : places_) send_or_suspect(id, message);
}

// The others do not wait for newcomers that hang. Those who train are busy, or fail as they go
// over, which shows.
void Session::check_prepared_deadline(double now) {
  if (now - assigned_at_ <= options_.join_timeout_s) return;
  std::vector<Member*> late;
  for (const auto& [id, place] : places_) {
    const auto found = prepared_.find(id);
    Member* member = find_member(id);
    if (found != prepared_.end() && (found->second || crowded_)) continue;
    if (prepares_only(*member)) late.push_back(member);
  }
  if (late.empty()) return go_over(now);
  const std::string reason =
      fmt::format("not prepared within elastic.join_timeout_s = {:.1f} s", options_.join_timeout_s);
  for (Member* member : late) {
    // With the first of them the others get another chance.
    if (prepares_only(*member)) return lose(member, describe(*member) + ": " + reason, now);
  }
}

// It may have lost another newcomer: nobody who trains is concerned, and it may try again.
void Session::give_up_newcomer(Member* member, const std::string& reason, double now) {
  if (++member->link_errors > kMostFailures) return lose(member, reason, now);
  event("link_error", reason);
  send_or_suspect(member->id, halt_message(generation_, reason));
  prepare(reason, now);
}

// Whoever has handed its state over may go once the new generation holds it twice.
void Session::release_leavers(double now) {
  for (Member& member : state_.members) {
    if (member.role == MemberRole::kWorker && member.state == MemberState::kDraining &&
        member.rank < 0 && training_->rank_of(member.id) < 0) {
      dismiss(&member, "left the run as it was asked to", /*ok=*/true, now);
    }
  }
}

}  // namespace muster
