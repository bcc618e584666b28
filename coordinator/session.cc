#include "coordinator/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "common/error.h"
#include "common/logging.h"
#include "common/process.h"

namespace muster {

namespace {

// How long the first word of a fault is kept back for a better one: a worker whose peer was killed
// reports a broken collective before the node agent reports the killed process.
constexpr double kSuspicionS = 1.0;
// How often departures are looked at while the run ends.
constexpr double kDeparturePollS = 0.05;
// An observer that has not asked for this long is not waited for.
constexpr double kWatcherS = 2.0;

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
      if (member->role == MemberRole::kNode) on_process_exited(envelope.process_exited(), now);
      break;
    case proto::Envelope::kDatasetReport:
      if (member->role == MemberRole::kData) {
        on_dataset_report(*member, envelope.dataset_report(), now);
      }
      break;
    default:
      if (member->role == MemberRole::kWorker) on_worker_message(peer, member, envelope, now);
  }
}

void Session::on_worker_message(const std::string& peer, Member* member,
                                const proto::Envelope& envelope, double now) {
  // In the generation that trains, which may be an older one than the newest assigned.
  const int rank = training_ ? training_->rank_of(member->id) : -1;
  switch (envelope.body_case()) {
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
      }
      break;
    case proto::Envelope::kHalted:
      on_halted(*member, envelope.halted(), now);
      break;
    case proto::Envelope::kStoreSet: {
      const auto& set = envelope.store_set();
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

void Session::on_order(const std::string& peer, const proto::Envelope& envelope, double now) {
  try {
    const std::string what =
        envelope.has_scale_request()
            ? scale(envelope.scale_request().workers(), now)
            : drain(envelope.drain_request().who(), envelope.drain_request().reason(), now);
    proto::Envelope accepted;
    accepted.set_request_id(envelope.request_id());
    accepted.mutable_accepted()->set_what(what);
    send_(peer, std::move(accepted));
  } catch (const ConfigError& error) {
    refuse(peer, envelope.request_id(), error.what());
  }
}

void Session::on_hello(const std::string& peer, const proto::Envelope& envelope, double now) {
  const proto::Hello& hello = envelope.hello();
  const auto role = role_of(hello.role());
  if (!role) return refuse(peer, envelope.request_id(), "hello without a known role");
  if (outcome_ && find_member(hello.member_id()) == nullptr) {
    return refuse(peer, envelope.request_id(), "the run is over: " + outcome_->reason);
  }
  Member member;
  member.id = hello.member_id();
  member.role = *role;
  member.node_id = hello.node_id();
  member.host = hello.host();
  member.pid = hello.pid();
  member.workers = std::max(0, hello.workers());
  member.device = hello.device();
  member.arrival = static_cast<int64_t>(state_.members.size());
  member.last_heard = now;
  if (auto reason = refuse_reason(state_, options_, member)) {
    event("member_refused", fmt::format("{}: {}", describe(member), *reason));
    return refuse(peer, envelope.request_id(), *reason);
  }
  // A data service that was started anew may be here before its agent's word of the old one's end.
  for (Member& other : state_.members) {
    if (*role == MemberRole::kData && other.role == *role && other.node_id == member.node_id &&
        other.id != member.id && other.state != MemberState::kGone) {
      lose_data(&other, describe(other) + " was started anew", /*replaced=*/true, now);
    }
  }
  if (Member* known = find_member(member.id)) {
    known->last_heard = now;
    member_of_.erase(peer_of_[member.id]);
    anybody_back_ = true;
  } else {
    state_.members.push_back(member);
    event("member_joined", describe(member) + " joined");
  }
  peer_of_[member.id] = peer;
  member_of_[peer] = member.id;
  proto::Envelope welcome;
  welcome.set_request_id(envelope.request_id());
  welcome.mutable_welcome()->set_run_name(config_.run.name);
  welcome.mutable_welcome()->set_config_toml(config_toml_);
  welcome.mutable_welcome()->set_run_dir(run_.root);
  welcome.mutable_welcome()->set_heartbeat_s(config_.elastic.heartbeat_s);
  welcome.mutable_welcome()->set_run_token(run_token_);
  welcome.mutable_welcome()->set_patience_s(config_.elastic.coordinator_timeout_s);
  send_(peer, std::move(welcome));
  const Member& now_here = *find_member(member.id);
  if (phase_ == Phase::kHalting && now_here.assigned) send_halt(now_here);
  if (outcome_) {  // it comes back only now
    proto::Envelope stop;
    stop.mutable_stop()->set_ok(outcome_->ok);
    stop.mutable_stop()->set_reason(outcome_->reason);
    send_(peer, std::move(stop));
  }
}

void Session::on_status_request(const std::string& peer, uint64_t request_id, double now) {
  proto::Envelope answer;
  answer.set_request_id(request_id);
  *answer.mutable_status() = status(now);
  const bool told = send_(peer, std::move(answer));
  watchers_[peer] = now;
  if (outcome_ && told) watchers_.erase(peer);
}

void Session::on_ready(const Member& member, const proto::Ready& ready, double now) {
  if (phase_ != Phase::kStarting || ready.generation() != generation_) return;
  if (!assigned_member(member.id)) return;
  ready_[member.id] = ready;
  start_training(now);
}

void Session::on_worker_failed(const Member& member, const proto::WorkerFailed& failed,
                               double now) {
  const std::string reason = fmt::format("{} failed: {}", describe(member), failed.error());
  const bool current = failed.generation() == generation_ ||
                       (changing_ && failed.generation() == training_->generation());
  if (failed.peer() && current) return halt(reason, now);
  if (failed.peer() && phase_ == Phase::kHalting) return;
  suspect({.member_id = member.id,
           .reason = reason,
           .due = now + kSuspicionS,
           .since = now,
           .secondary = failed.peer()});
}

void Session::on_process_exited(const proto::ProcessExited& exited, double now) {
  const std::string how = ExitStatus{exited.signalled(), exited.code()}.to_string();
  const bool replaced = exited.restart_in_s() >= 0;
  if (!exited.no_restart().empty()) event("node_set_aside", exited.no_restart());
  leaving_by_.erase(exited.member_id());
  Member* gone = find_member(exited.member_id());
  if (gone == nullptr) {
    const auto role = role_of(exited.role()).value_or(MemberRole::kWorker);
    const std::string reason =
        fmt::format("a {} (pid {} on host {}) {} before it joined: its log is in {}",
                    to_string(role), exited.pid(), exited.host(), how, run_.logs());
    // Agents tell a coordinator that was started anew of exits that the one before knew.
    if (restored_) return spdlog::info("{}", reason);
    if (state_.running || replaced) return event("process_lost", reason);
    return fault(reason, now);
  }
  if (gone->state == MemberState::kGone) return;
  std::string reason = describe(*gone) + " " + how;
  // Its own last words say more than its exit status.
  if (suspicion_ && suspicion_->member_id == gone->id && !suspicion_->unreachable) {
    return fault(suspicion_->reason, now);
  }
  if (!state_.running && !replaced) return fault(reason, now);
  if (gone->role == MemberRole::kData) return lose_data(gone, reason, replaced, now);
  lose_worker(gone, reason, now);
}

void Session::on_withdrawn(Member* member, const std::string& reason) {
  if (state_.running && assigned_member(member->id)) return;  // its silence will be noticed
  member->state = MemberState::kGone;
  event("member_refused", fmt::format("{}: {}", describe(*member), reason));
}

void Session::on_leaving(Member* member, const std::string& reason, double now) {
  if (!state_.running) {
    member->state = MemberState::kDraining;
    return request_stop(fmt::format("{} was asked to leave ({})", describe(*member), reason), false,
                        now);
  }
  drain(member, fmt::format("{} was asked to leave ({})", describe(*member), reason));
}

void Session::request_stop(const std::string& reason, bool immediately, double now) {
  now_ = now;
  if (outcome_) return;
  if (immediately) {
    event("stop", "at once: " + reason);
    end({false,
         fmt::format("stopped at once, after step {}: {}{}", committed(), reason, resume_hint())},
        now);
  } else if (!training_) {
    event("stop", reason);
    end({true, "stopped before the first step: " + reason}, now);
  } else if (phase_ == Phase::kJoining) {
    event("stop", reason);
    end({false, fmt::format("stopped while no worker was there: {}{}", reason, resume_hint())},
        now);
  } else if (phase_ == Phase::kStarting || phase_ == Phase::kHalting) {
    if (!stop_reason_) event("stop", "once the next generation trains: " + reason);
    stop_reason_ = reason;
  } else if (phase_ == Phase::kTraining) {
    event("stop", "after the steps that are planned: " + reason);
    phase_ = Phase::kStopping;
    training_->leave(reason);
  }
}

void Session::abandon(const std::string& reason, double now) {
  now_ = now;
  give_up(reason, now);
}

// Whoever does not listen for a while, being stopped or busy, must not call others silent: what
// they said lies unread.
void Session::notice_absence(double now) {
  const double away = now - now_;
  if (now_ == 0.0 || away <= 1.5 * config_.elastic.heartbeat_s) return;
  for (Member& member : state_.members) member.last_heard += away;
}

void Session::tick(double now) {
  notice_absence(now);
  now_ = now;
  if (phase_ == Phase::kOver) return;
  if (dirty_) keep_for_restore();
  if (now >= next_beat_) beat(now);
  if (outcome_) {
    watch_departures(now);
    next_tick_ = now + kDeparturePollS;
    return;
  }
  judge_suspicion(now);
  if (!outcome_) {
    for (Decision alive = decide_alive(now, state_, options_);
         !outcome_ && alive.verdict == Verdict::kFault;
         alive = decide_alive(now, state_, options_)) {
      lose(find_member(alive.member_id), alive.reason, now);
    }
  }
  if (!outcome_ && phase_ == Phase::kJoining) try_start(now);
  if (!outcome_ && phase_ == Phase::kStarting) check_ready_deadline(now);
  if (!outcome_) watch_changes(now);
  next_tick_ = next_beat_;
  if (suspicion_) next_tick_ = std::min(next_tick_, suspicion_->due);
  if (outcome_) next_tick_ = now;
}

void Session::beat(double now) {
  next_beat_ = now + config_.elastic.heartbeat_s;
  for (Member& member : state_.members) {
    if (member.state == MemberState::kGone || !is_here(member)) continue;
    proto::Envelope envelope;
    envelope.mutable_heartbeat();
    if (send_to(member, std::move(envelope))) continue;
    if (member.role == MemberRole::kObserver) {
      member.state = MemberState::kGone;
    } else if (!outcome_) {
      suspect({.member_id = member.id,
               .reason = describe(member) + " is gone: its connection closed",
               .due = now + kSuspicionS,
               .since = now,
               .unreachable = true});
    }
  }
}

void Session::suspect(const Suspicion& suspicion) {
  // The first word stands; but a failure of a worker's own explains those of its peers, a vanished
  // process those of all who talked to it, and a vanished node agent those of its processes.
  const Member* member = find_member(suspicion.member_id);
  const bool is_agent = member != nullptr && member->role == MemberRole::kNode;
  const bool explains =
      suspicion_ && ((suspicion_->secondary && !suspicion.secondary) ||
                     (suspicion.unreachable && (!suspicion_->unreachable || is_agent)));
  if (suspicion_ && !explains) return;
  const double due = suspicion_ ? suspicion_->due : suspicion.due;
  suspicion_ = suspicion;
  suspicion_->due = due;
  next_tick_ = std::min(next_tick_, due);
}

void Session::judge_suspicion(double now) {
  if (!suspicion_) return;
  const Member* member = find_member(suspicion_->member_id);
  if (suspicion_->unreachable && member != nullptr && member->last_heard > suspicion_->since) {
    suspicion_.reset();  // only its connection had broken
  } else if (now >= suspicion_->due) {
    const Suspicion judged = *suspicion_;
    suspicion_.reset();
    Member* lost = find_member(judged.member_id);
    // A process that is not reached any more is lost, what it says of itself is final.
    if (judged.unreachable && lost != nullptr && lost->state != MemberState::kGone) {
      lose(lost, judged.reason, now);
    } else if (!judged.unreachable) {
      fault(judged.reason, now);
    }
  }
}

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
  for (Member& member : state_.members) {
    if (member.state == MemberState::kGone) continue;
    const bool told = send_to(member, envelope) || may_come_back(member);
    member.state = told && waited_for(member) ? MemberState::kDraining : MemberState::kGone;
  }
}

void Session::watch_departures(double now) {
  // A send to a peer whose connection has ended fails: that is how a member's departure shows.
  bool all_gone = true;
  std::string who;
  for (Member& member : state_.members) {
    if (member.state == MemberState::kGone) continue;
    proto::Envelope envelope;
    envelope.mutable_heartbeat();
    if (send_to(member, std::move(envelope)) || may_come_back(member)) {
      all_gone = false;
      who += (who.empty() ? "" : ", ") + describe(member);
    } else {
      member.state = MemberState::kGone;
    }
  }
  std::erase_if(watchers_, [&](const auto& watcher) {
    proto::Envelope envelope;
    envelope.mutable_heartbeat();
    return watcher.second < now - kWatcherS || !send_(watcher.first, std::move(envelope));
  });
  const bool late = now - ending_since_ > config_.elastic.shutdown_timeout_s;
  if (late && !all_gone) {
    event("shutdown_timeout", fmt::format("these did not leave within {:.0f} s: {}",
                                          config_.elastic.shutdown_timeout_s, who));
  }
  if (late || (all_gone && watchers_.empty())) phase_ = Phase::kOver;
}

Member* Session::member_of_peer(const std::string& peer) {
  const auto found = member_of_.find(peer);
  return found == member_of_.end() ? nullptr : find_member(found->second);
}

Member* Session::find_member(const std::string& id) {
  for (Member& member : state_.members) {
    if (member.id == id) return &member;
  }
  return nullptr;
}

bool Session::send_to(const Member& member, proto::Envelope envelope) {
  const auto peer = peer_of_.find(member.id);
  return peer != peer_of_.end() && send_(peer->second, std::move(envelope));
}

void Session::send_or_suspect(const std::string& id, proto::Envelope envelope) {
  Member* member = find_member(id);
  if (member == nullptr || member->state == MemberState::kGone) return;
  if (send_to(*member, std::move(envelope))) return;
  suspect({.member_id = member->id,
           .reason = describe(*member) + " is gone: its connection closed",
           .due = now_ + kSuspicionS,
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
  dirty_ = true;  // whatever changes the members or the generation is an event
  log_->event({.kind = kind,
               .reason = reason,
               .duration_s = duration_s,
               .step = committed(),
               .generation = generation_});
}

}  // namespace muster
