#include "coordinator/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "common/error.h"
#include "common/logging.h"

namespace muster {

namespace {

// How often deadlines are looked at, at least; and for each heartbeat.
constexpr double kDeadlinesS = 0.25;
constexpr double kLooksABeat = 4.0;
// What follows closely on one another is looked at together.
constexpr double kTogetherS = 0.02;
// How often departures are looked at while the run ends.
constexpr double kDeparturePollS = 0.05;

}  // namespace

std::optional<MemberRole> role_of(proto::Role role) {
  switch (role) {
    case proto::ROLE_NODE:
      return MemberRole::kNode;
    case proto::ROLE_DATA:
      return MemberRole::kData;
    case proto::ROLE_WORKER:
      return MemberRole::kWorker;
    case proto::ROLE_OBSERVER:
      return MemberRole::kObserver;
    default:
      return std::nullopt;
  }
}

proto::Role to_proto(MemberRole role) {
  switch (role) {
    case MemberRole::kNode:
      return proto::ROLE_NODE;
    case MemberRole::kData:
      return proto::ROLE_DATA;
    case MemberRole::kWorker:
      return proto::ROLE_WORKER;
    case MemberRole::kObserver:
      return proto::ROLE_OBSERVER;
  }
  return proto::ROLE_UNKNOWN;
}

Session::Session(const Config& config, const SessionOptions& options, RunLog* log, Send send,
                 double now)
    : config_(config),
      config_toml_(to_toml(config)),
      run_{config.run.dir},
      log_(log),
      send_(std::move(send)),
      resume_command_(options.resume_command.empty() ? fmt::format("muster train {}", run_.config())
                                                     : options.resume_command),
      run_token_(options.run_token),
      options_{.expected_workers = options.expected_workers,
               .join_timeout_s = config.elastic.join_timeout_s,
               .heartbeat_s = config.elastic.heartbeat_s,
               .global_batch = config.train.global_batch,
               .cpu_only = config.run.device == "cpu",
               .parallel = config.parallel,
               .min_workers = static_cast<int>(config.elastic.min_workers),
               .max_workers = static_cast<int>(config.elastic.max_workers),
               .wait_timeout_s = config.elastic.wait_timeout_s,
               .join_window_s = config.elastic.join_window_s},
      generation_(log->last_generation()),
      stragglers_(
          {.factor = config.elastic.straggler_factor, .steps = config.elastic.straggler_steps}),
      started_(now),
      looked_(now),
      next_beat_(now + config.elastic.heartbeat_s),
      next_tick_(now) {
  state_.started = now;
}

void Session::handle(const std::string& peer, const proto::Envelope& envelope, double now) {
  notice_absence(now);
  now_ = now;
  Member* member = member_of_peer(peer);
  if (member != nullptr) member->last_heard = now;
  switch (envelope.body_case()) {
    case proto::Envelope::kHello:
      on_hello(peer, envelope, now);
      return;
    case proto::Envelope::kStatusRequest:
      on_status_request(peer, envelope.request_id(), now);
      return;
    case proto::Envelope::kStopRequest: {
      proto::Envelope accepted;
      accepted.set_request_id(envelope.request_id());
      accepted.mutable_accepted();
      send_(peer, std::move(accepted));
      request_stop(envelope.stop_request().reason(), envelope.stop_request().immediately(), now);
      return;
    }
    case proto::Envelope::kScaleRequest:
    case proto::Envelope::kDrainRequest:
      on_order(peer, envelope, now);
      return;
    default:
      break;
  }
  if (member == nullptr && restored_) {
    proto::Envelope again;
    again.mutable_hello_again();
    send_(peer, std::move(again));
    return;
  }
  if (member == nullptr) {
    refuse(peer, envelope.request_id(),
           "this coordinator does not know you: say hello first (was it restarted?)");
    return;
  }
  if (outcome_) return;
  if (member->state == MemberState::kGone) {
    // It was stopped or cut off for so long that the run went on without it.
    if (leaving_by_.contains(member->id)) return;
    proto::Envelope stop;
    stop.mutable_stop()->set_reason("the run went on without this process, which had not answered");
    send_(peer, std::move(stop));
    return;
  }
  switch (envelope.body_case()) {
    case proto::Envelope::kLeaving:
      on_leaving(member, envelope.leaving().reason(), now);
      break;
    case proto::Envelope::kWithdrawn:
      on_withdrawn(member, envelope.withdrawn().reason());
      break;
    case proto::Envelope::kProcessExited:
      if (member->role == MemberRole::kNode) {
        on_process_exited(member, envelope.process_exited(), now);
      }
      break;
    case proto::Envelope::kDatasetReport:
      if (member->role == MemberRole::kData) {
        on_dataset_report(*member, envelope.dataset_report(), now);
      }
      break;
    default:
      if (member->role == MemberRole::kWorker) on_worker_message(peer, member, envelope, now);
      if (member->role == MemberRole::kNode && envelope.heartbeat().has_load()) {
        note_load(member, envelope.heartbeat().load());
      }
  }
}

void Session::on_worker_message(const std::string& peer, Member* member,
                                const proto::Envelope& envelope, double now) {
  // In the generation that trains, which may be an older one than the newest assigned.
  const int rank = training_ ? training_->rank_of(member->id) : -1;
  switch (envelope.body_case()) {
    case proto::Envelope::kPrepared:
      on_prepared(*member, envelope.prepared(), now);
      break;
    case proto::Envelope::kReady:
      on_ready(*member, envelope.ready(), now);
      break;
    case proto::Envelope::kStepReport:
      if (rank >= 0 && envelope.step_report().rank() == rank) {
        training_->on_step_report(envelope.step_report(), now);
        watch_speed(*member, envelope.step_report());
      }
      break;
    case proto::Envelope::kEvalReport:
      if (rank == 0) training_->on_eval_report(envelope.eval_report(), now);
      break;
    case proto::Envelope::kShardSaved:
      if (rank >= 0 && envelope.shard_saved().rank() == rank) {
        training_->on_shard_saved(envelope.shard_saved(), now);
        look_soon();  // a generation that waits may have saved all
      }
      break;
    case proto::Envelope::kHalted:
      on_halted(member, envelope.halted(), now);
      break;
    case proto::Envelope::kStoreSet: {
      const auto& set = envelope.store_set();
      if (preparing_) preparing_->shown.insert(member->id);
      for (const std::string& waiting : store_.set(set.key(), set.value())) {
        proto::Envelope answer;
        answer.mutable_store_value()->set_key(set.key());
        answer.mutable_store_value()->set_value(set.value());
        send_(waiting, std::move(answer));
      }
      break;
    }
    case proto::Envelope::kStoreGet:
      if (auto value = store_.get(envelope.store_get().key(), peer)) {
        proto::Envelope answer;
        answer.mutable_store_value()->set_key(envelope.store_get().key());
        answer.mutable_store_value()->set_value(*value);
        send_(peer, std::move(answer));
      }
      break;
    case proto::Envelope::kWorkerFailed:
      on_worker_failed(*member, envelope.worker_failed(), now);
      break;
    default:
      break;  // heartbeats, and what a worker has no business to say
  }
  after_commits(now);
  note_outcome(now);
}

void Session::on_status_request(const std::string& peer, uint64_t request_id, double now) {
  proto::Envelope answer;
  answer.set_request_id(request_id);
  *answer.mutable_status() = status(now);
  const bool told = send_(peer, std::move(answer));
  watchers_[peer] = now;
  if (!outcome_ || !told) return;
  watchers_.erase(peer);
  look_soon();  // nobody else may be waited for
}

// Whoever does not listen for a while, being stopped or busy, must not call others silent: what
// they said lies unread.
void Session::notice_absence(double now) {
  const double away = now - now_;
  if (now_ == 0.0 || away <= 1.5 * config_.elastic.heartbeat_s) return;
  for (Member& member : state_.members) member.last_heard += away;
}

// Something has changed that may ask for a decision. Those look at every member, so not after every
// message; and where there are many, what follows closely on one another is looked at together.
void Session::look_soon() {
  constexpr size_t kMany = 256;
  next_tick_ = std::min(next_tick_, looked_ + (state_.members.size() > kMany ? kTogetherS : 0.0));
}

void Session::tick(double now) {
  notice_absence(now);
  now_ = now;
  if (phase_ == Phase::kOver || now < next_tick_) return;
  looked_ = now;
  next_tick_ = now + std::min(kDeadlinesS, config_.elastic.heartbeat_s / kLooksABeat);
  if (dirty_ && (outcome_ || now >= next_keep_)) keep_for_restore();
  if (now >= next_beat_) beat(now);
  if (outcome_) {
    next_tick_ = now + kDeparturePollS;
    return watch_departures(now);
  }
  judge_suspicion(now);
  for (Decision alive = decide_alive(now, state_, options_);
       !outcome_ && alive.verdict == Verdict::kFault; alive = decide_alive(now, state_, options_)) {
    lose(find_member(alive.member_id), alive.reason, now);
  }
  if (!outcome_ && phase_ == Phase::kJoining) try_start(now);
  if (!outcome_ && phase_ == Phase::kStarting) check_ready_deadline(now);
  if (!outcome_) watch_changes(now);
  note_outcome(now);
  next_tick_ = std::min(next_tick_, next_beat_);
  if (dirty_) next_tick_ = std::min(next_tick_, std::max(next_keep_, looked_ + kTogetherS));
  if (suspicion_) next_tick_ = std::min(next_tick_, suspicion_->due);
}

void Session::beat(double now) {
  next_beat_ = now + config_.elastic.heartbeat_s;
  proto::Envelope envelope;
  envelope.mutable_heartbeat();
  const Message heartbeat = envelope;
  for (Member& member : state_.members) {
    if (member.state == MemberState::kGone || !is_here(member)) continue;
    if (send_to(member, heartbeat)) continue;
    if (member.role == MemberRole::kObserver) {
      member.state = MemberState::kGone;
    } else if (!outcome_) {
      suspect({.member_id = member.id,
               .reason = describe(member) + " is gone: its connection closed",
               .since = now,
               .unreachable = true});
    }
  }
}

Member* Session::member_of_peer(const std::string& peer) {
  const auto found = by_peer_.find(peer);
  return found == by_peer_.end() ? nullptr : &state_.members[found->second];
}

Member* Session::find_member(const std::string& id) {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &state_.members[found->second];
}

Member* Session::add_member(Member member) {
  by_id_.emplace(member.id, state_.members.size());
  return &state_.members.emplace_back(std::move(member));
}

bool Session::send_to(const Member& member, const Message& message) {
  return is_here(member) && send_(member.peer, message);
}

void Session::send_or_suspect(const std::string& id, const Message& message) {
  Member* member = find_member(id);
  if (member == nullptr || member->state == MemberState::kGone) return;
  if (send_to(*member, message)) return;
  suspect({.member_id = member->id,
           .reason = describe(*member) + " is gone: its connection closed",
           // What was not sent stays lost, so a later sign of life does not help.
           .since = std::numeric_limits<double>::infinity(),
           .unreachable = true});
}

void Session::refuse(const std::string& peer, uint64_t request_id, const std::string& reason) {
  proto::Envelope envelope;
  envelope.set_request_id(request_id);
  envelope.mutable_refused()->set_reason(reason);
  send_(peer, std::move(envelope));
}

void Session::event(const std::string& kind, const std::string& reason, double duration_s) {
  // Whatever changes the members or the generation is an event.
  dirty_ = true;
  look_soon();
  log_->event({.kind = kind,
               .reason = reason,
               .duration_s = duration_s,
               .step = committed(),
               .generation = generation_});
}

}  // namespace muster
