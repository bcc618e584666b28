// The part of Session that takes orders from outside: another size, who is to leave, the end.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "common/error.h"
#include "coordinator/session.h"

namespace muster {

namespace {

// A worker that is here to stay.
bool stays(const Member& member) {
  return member.role == MemberRole::kWorker &&
         (member.state == MemberState::kActive || member.state == MemberState::kStandby ||
          member.state == MemberState::kJoining);
}

}  // namespace

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
  keep_for_restore();
  return what;
}

std::string Session::scale(int workers, double now) {
  now_ = now;
  if (outcome_) throw ConfigError("the run is over");
  if (workers < options_.min_workers) {
    throw ConfigError(fmt::format("{} workers are fewer than elastic.min_workers = {}", workers,
                                  options_.min_workers));
  }
  const int before = std::exchange(state_.target_workers, 0);
  if (const int most = allowed_world(workers, state_, options_); most != workers) {
    state_.target_workers = before;
    throw ConfigError(fmt::format(
        "the run cannot have {} workers; {} would do (train.global_batch, elastic.max_workers, "
        "parallel.shard_group)",
        workers, most));
  }
  state_.target_workers = workers;
  look_soon();
  // The youngest go.
  std::vector<Member*> here;
  for (Member& member : state_.members) {
    if (stays(member)) here.push_back(&member);
  }
  std::sort(here.begin(), here.end(),
            [](const Member* a, const Member* b) { return a->arrival < b->arrival; });
  const int count = static_cast<int>(here.size());
  for (int i = workers; i < count; ++i) {
    drain(here[static_cast<size_t>(i)],
          fmt::format("{}: the run is to have {} workers", describe(*here[static_cast<size_t>(i)]),
                      workers));
  }
  const int missing = missing_workers();
  if (missing < 0) send_away_coming(-missing);
  if (missing > 0 && start_workers(missing, /*only_room=*/false) == 0) {
    throw ConfigError("no node is there, or none listens, to start workers on");
  }
  keep_for_restore();
  return fmt::format("from {} to {} workers", count, workers);
}

std::map<std::string, int> Session::coming_workers() const {
  std::map<std::string, int> coming;
  for (const Member& agent : state_.members) {
    if (agent.role != MemberRole::kNode || agent.state != MemberState::kActive) continue;
    coming[agent.id] = agent.planned + agent.asked - agent.heeded - agent.unwanted;
  }
  for (const Member& worker : state_.members) {
    if (worker.role != MemberRole::kWorker) continue;
    const auto node = coming.find(worker.node_id);
    // Those that were let go run for a while.
    const bool runs = worker.state != MemberState::kGone || leaving_by_.contains(worker.id);
    if (node != coming.end() && runs) --node->second;
  }
  for (auto& [agent, some] : coming) some = std::max(0, some);
  return coming;
}

// Of those who were asked for; below 0: more are here, or on their way.
int Session::missing_workers() const {
  int missing = state_.target_workers;
  for (const auto& [agent, some] : coming_workers()) missing -= some;
  return missing -
         static_cast<int>(std::count_if(state_.members.begin(), state_.members.end(), stays));
}

// They are told once they are here.
void Session::send_away_coming(int count) {
  for (const auto& [id, some] : coming_workers()) {
    const int here = std::min(some, count);
    find_member(id)->unwanted += here;
    count -= here;
  }
}

// Spread over the nodes, the emptiest first.
int Session::start_workers(int count, bool only_room) {
  std::map<std::string, int> on_node = coming_workers();  // by agent's id
  std::erase_if(on_node, [&](const auto& node) {
    const Member& agent = *find_member(node.first);
    const bool trains = dataset_of(state_, agent.id) != nullptr && agent.set_aside_until <= now_;
    return only_room && !trains;
  });
  for (const Member& member : state_.members) {
    if (member.role == MemberRole::kWorker && member.state != MemberState::kGone &&
        on_node.contains(member.node_id)) {
      ++on_node[member.node_id];
    }
  }
  const auto full = [&](const auto& node) {
    return only_room && node.second >= find_member(node.first)->workers;
  };
  std::erase_if(on_node, full);
  std::map<std::string, int> more;
  int started = 0;
  for (; started < count && !on_node.empty(); ++started) {
    const auto emptiest =
        std::min_element(on_node.begin(), on_node.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; });
    ++more[emptiest->first];
    ++emptiest->second;
    if (full(*emptiest)) on_node.erase(emptiest);
  }
  for (const auto& [agent, workers] : more) {
    proto::Envelope envelope;
    envelope.mutable_start_workers()->set_count(workers);
    if (send_to(*find_member(agent), std::move(envelope))) {
      find_member(agent)->asked += workers;
    } else {
      started -= workers;
    }
  }
  return started;
}

// Where `muster scale` has said how many workers there are to be: nodes that have fewer than they
// brought start others in place of those whose own nodes do not.
void Session::replace_lost() {
  if (!state_.running || outcome_ || stop_reason_ || phase_ == Phase::kStopping) return;
  const int missing = missing_workers();
  if (missing <= 0) return;
  const int started = start_workers(missing, /*only_room=*/true);
  if (started > 0) {
    event("workers_started", fmt::format("{} in place of lost ones, as {} were asked for", started,
                                         state_.target_workers));
  }
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
    call_off("the run is to stop");
    phase_ = Phase::kStopping;
    training_->leave(reason);
  }
}

void Session::abandon(const std::string& reason, double now) {
  now_ = now;
  give_up(reason, now);
}

}  // namespace muster
