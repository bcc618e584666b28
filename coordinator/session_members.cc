// The part of Session that knows who is there: who comes, is asked to leave, and is lost.
#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/logging.h"
#include "common/process.h"
#include "coordinator/session.h"

namespace muster {

namespace {

// How long the first word of a fault is kept back for a better one: a worker whose peer was killed
// reports a broken collective before the node agent reports the killed process.
constexpr double kSuspicionS = 1.0;
// Workers that are lost one after the other, at least, with no step in between: a crash that every
// try repeats is to end.
constexpr int kMostLost = 16;

}  // namespace

void Session::on_hello(const std::string& peer, const proto::Envelope& envelope, double now) {
  const proto::Hello& hello = envelope.hello();
  const auto role = role_of(hello.role());
  if (!role) return refuse(peer, envelope.request_id(), "hello without a known role");
  Member* member = find_member(hello.member_id());
  if (outcome_ && member == nullptr) {
    return refuse(peer, envelope.request_id(), "the run is over: " + outcome_->reason);
  }
  Member newcomer;
  newcomer.id = hello.member_id();
  newcomer.role = *role;
  newcomer.node_id = hello.node_id();
  newcomer.host = hello.host();
  newcomer.pid = hello.pid();
  newcomer.workers = std::max(0, hello.workers());
  if (*role == MemberRole::kNode) newcomer.planned = newcomer.workers;
  newcomer.device = hello.device();
  newcomer.arrival = state_.members.empty() ? 0 : state_.members.back().arrival + 1;
  if (auto reason = refuse_reason(state_, options_, newcomer, member)) {
    event("member_refused", fmt::format("{}: {}", describe(newcomer), *reason));
    return refuse(peer, envelope.request_id(), *reason);
  }
  // A data service that was started anew may be here before its agent's word of the old one's end.
  if (*role == MemberRole::kData) replace_data(newcomer, now);
  if (member != nullptr) {
    by_peer_.erase(member->peer);
    anybody_back_ = true;
  } else {
    member = add_member(newcomer);
    event("member_joined", describe(*member) + " joined");
  }
  member->last_heard = now;
  member->peer = peer;
  by_peer_[peer] = by_id_.at(member->id);
  if (hello.has_load()) {
    note_load(member, hello.load());
    member->asked = member->heeded;  // the rest was lost on its way, or asked for by another
  }
  proto::Envelope welcome;
  welcome.set_request_id(envelope.request_id());
  welcome.mutable_welcome()->set_run_name(config_.run.name);
  welcome.mutable_welcome()->set_config_toml(config_toml_);
  welcome.mutable_welcome()->set_run_dir(run_.root);
  welcome.mutable_welcome()->set_heartbeat_s(config_.elastic.heartbeat_s);
  welcome.mutable_welcome()->set_run_token(run_token_);
  welcome.mutable_welcome()->set_patience_s(config_.elastic.coordinator_timeout_s);
  send_(peer, std::move(welcome));
  if (turn_away_surplus(member, now)) return;
  // One that this coordinator does not know may have been given up by the one before, and still be
  // in a generation of that time.
  const bool stale = restored_ && *role == MemberRole::kWorker && !member->assigned;
  if (stale || (phase_ == Phase::kHalting && member->assigned)) {
    send_or_suspect(member->id, halt_message(generation_, halt_reason_));
  }
  if (outcome_) {  // it comes back only now
    proto::Envelope stop;
    stop.mutable_stop()->set_ok(outcome_->ok);
    stop.mutable_stop()->set_reason(outcome_->reason);
    send_(peer, std::move(stop));
  }
}

void Session::replace_data(const Member& newcomer, double now) {
  for (Member& other : state_.members) {
    if (other.role == MemberRole::kData && other.node_id == newcomer.node_id &&
        other.id != newcomer.id && other.state != MemberState::kGone) {
      lose_data(&other, describe(other) + " was started anew", /*replaced=*/true, now);
    }
  }
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
  if (member->role == MemberRole::kNode) replace_lost();
}

void Session::on_process_exited(Member* agent, const proto::ProcessExited& exited, double now) {
  if (exited.has_load()) note_load(agent, exited.load());
  const Member* gone = find_member(exited.member_id());
  const bool joined = gone != nullptr && gone->role == MemberRole::kWorker;
  const bool restarted = exited.restart_in_s() >= 0;
  // One that was to leave, and crashed instead, is started anew by its node all the same.
  const bool left =
      joined && (gone->state == MemberState::kDraining || leaving_by_.contains(gone->id));
  if (left && restarted) ++agent->unwanted;
  if (!exited.no_restart().empty()) agent->set_aside_until = now + config_.elastic.cool_down_s;
  take_exit(exited, now);
  // One that never joined may not find room: another try would not, either.
  if (joined && !restarted) replace_lost();
}

// What the agent has not heard of yet when it says this is added to it.
void Session::note_load(Member* agent, const proto::NodeLoad& load) {
  agent->planned = std::max(0, load.workers());
  agent->heeded = load.asked();
  agent->asked = std::max(agent->asked, load.asked());
}

// A worker that was started and is not needed any more by the time that it is here.
bool Session::turn_away_surplus(Member* worker, double now) {
  if (worker->role != MemberRole::kWorker || worker->assigned || !state_.running || outcome_) {
    return false;
  }
  Member* agent = find_member(worker->node_id);
  if (agent == nullptr) return false;
  const bool leaves = agent->state == MemberState::kDraining;
  if (!leaves && agent->unwanted == 0) return false;
  if (!leaves) --agent->unwanted;
  dismiss(worker, leaves ? "its node leaves the run" : "as many workers as wanted are there",
          /*ok=*/true, now);
  return true;
}

void Session::take_exit(const proto::ProcessExited& exited, double now) {
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
    if (exited.told()) return spdlog::info("{}", reason);
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

void Session::suspect(const Suspicion& suspicion) {
  // The first word stands; but a failure of a worker's own explains those of its peers, a vanished
  // process those of all who talked to it, and a vanished node agent those of its processes.
  if (suspicion_ && disproved(*suspicion_)) suspicion_.reset();
  const Member* member = find_member(suspicion.member_id);
  const bool is_agent = member != nullptr && member->role == MemberRole::kNode;
  const bool explains =
      suspicion_ && ((suspicion_->secondary && !suspicion.secondary) ||
                     (suspicion.unreachable && (!suspicion_->unreachable || is_agent)));
  if (suspicion_ && !explains) return;
  const double due = suspicion_ ? suspicion_->due : now_ + kSuspicionS;
  suspicion_ = suspicion;
  suspicion_->due = due;
  next_tick_ = std::min(next_tick_, due);
}

// Only its connection had broken.
bool Session::disproved(const Suspicion& suspicion) {
  const Member* member = find_member(suspicion.member_id);
  return suspicion.unreachable && member != nullptr && member->last_heard > suspicion.since;
}

void Session::judge_suspicion(double now) {
  if (!suspicion_) return;
  if (disproved(*suspicion_)) {
    suspicion_.reset();
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
  if (member->role == MemberRole::kWorker && takes_part(*member)) {
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

// Whoever trains does not without this worker.
bool Session::takes_part(const Member& worker) const {
  const bool training =
      training_ && (phase_ != Phase::kStarting || changing_) && training_->rank_of(worker.id) >= 0;
  return assigned_member(worker.id) || training ||
         (phase_ == Phase::kStarting && places_.contains(worker.id)) ||
         (phase_ == Phase::kHalting && worker.assigned);
}

void Session::lose_worker(Member* member, const std::string& reason, double now) {
  if (member->state == MemberState::kGone) return;
  const bool involved = takes_part(*member);
  member->state = MemberState::kGone;
  if (!involved) return event("worker_lost", reason);
  links_alone_ = false;
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
    any = any || takes_part(worker);
  }
  if (ends_without(state_, options_)) return fault(reason, now);
  event("data_service_lost", reason);
  links_alone_ = links_alone_ && !any;
  if (any) halt(reason, now);
  replace_lost();
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
  replace_lost();
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
  const auto empties = [](const Member& member) {
    return member.role == MemberRole::kNode && member.state == MemberState::kDraining;
  };
  if (std::none_of(state_.members.begin(), state_.members.end(), empties)) return;
  std::unordered_set<std::string> busy;  // nodes
  for (const Member& member : state_.members) {
    if (member.role == MemberRole::kWorker &&
        (member.state != MemberState::kGone || leaving_by_.contains(member.id))) {
      busy.insert(member.node_id);
    }
  }
  for (Member& agent : state_.members) {
    if (!empties(agent) || busy.contains(agent.node_id)) continue;
    for (Member& member : state_.members) {
      if (member.node_id == agent.node_id && member.role == MemberRole::kData &&
          member.state != MemberState::kGone) {
        dismiss(&member, "its node leaves the run", /*ok=*/true, now);
      }
    }
    dismiss(&agent, "its workers have left the run", /*ok=*/true, now);
  }
}

}  // namespace muster
