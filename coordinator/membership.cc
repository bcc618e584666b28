#include "coordinator/membership.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "common/check.h"
#include "common/error.h"
#include "coordinator/listing.h"

namespace muster {

namespace {

bool is_worker(const Member& member) {
  return member.role == MemberRole::kWorker;
}
bool present(const Member& member) {
  return member.state != MemberState::kGone;
}
bool is_available(const Member& member) {
  return is_worker(member) &&
         (member.state == MemberState::kActive || member.state == MemberState::kStandby);
}

// Joins that follow one another closely are waited for this many windows in all.
constexpr int kMostJoinWindows = 4;

const Member* agent_of(const MembershipState& state, const std::string& node_id) {
  for (const Member& member : state.members) {
    if (present(member) && member.role == MemberRole::kNode && member.node_id == node_id) {
      return &member;
    }
  }
  return nullptr;
}

int count_workers(const MembershipState& state) {
  return static_cast<int>(
      std::count_if(state.members.begin(), state.members.end(),
                    [](const Member& m) { return is_worker(m) && present(m); }));
}

// Hosts are what people know; a node id is a number.
std::string host_of_node(const MembershipState& state, const std::string& node_id) {
  for (const Member& member : state.members) {
    if (member.node_id == node_id && !member.host.empty()) return member.host;
  }
  return "an unknown host";
}

// Ids of the nodes that have a worker, in order of arrival.
std::vector<std::string> worker_nodes(const MembershipState& state) {
  std::vector<const Member*> workers;
  for (const Member& member : state.members) {
    if (is_worker(member) && present(member)) workers.push_back(&member);
  }
  std::sort(workers.begin(), workers.end(),
            [](const Member* a, const Member* b) { return a->arrival < b->arrival; });
  std::vector<std::string> nodes;
  std::unordered_set<std::string_view> seen;
  for (const Member* worker : workers) {
    if (seen.insert(worker->node_id).second) nodes.push_back(worker->node_id);
  }
  return nodes;
}

using NodeIds = std::unordered_set<std::string_view>;

NodeIds nodes_with_dataset(const MembershipState& state) {
  NodeIds nodes;
  for (const NodeDataset& dataset : state.datasets) nodes.insert(dataset.node_id);
  return nodes;
}

// "1 of 4 workers have joined (alpha: 1 of 2, beta: 0 of 1); no node (muster node) has joined yet
// for 1 of them".
std::string joined_so_far(const MembershipState& state, int here, int expected) {
  std::unordered_map<std::string_view, int> workers;  // by node
  for (const Member& member : state.members) {
    if (is_worker(member) && present(member)) ++workers[member.node_id];
  }
  Listing nodes;
  for (const Member& agent : state.members) {
    if (agent.role != MemberRole::kNode || !present(agent)) continue;
    nodes.add([&] {
      return fmt::format("{}: {} of {}", agent.host, workers[agent.node_id], agent.workers);
    });
  }
  std::string text = fmt::format("{} of {} workers have joined", here, expected);
  if (!nodes.empty()) text += " (" + nodes.text() + ")";
  const int unoffered = expected - std::max(offered_workers(state), here);
  if (unoffered > 0) {
    text += fmt::format("; no node (muster node) has joined yet for {} of them", unoffered);
  }
  return text;
}

// What keeps the run from starting; empty: nothing.
std::string missing(const MembershipState& state, const MembershipOptions& options) {
  const int expected = expected_workers(state, options);
  if (expected == 0) return "a node agent (muster node) has yet to join";
  const int here = count_workers(state);
  const NodeIds reported = nodes_with_dataset(state);
  NodeIds served;
  for (const Member& member : state.members) {
    if (member.role == MemberRole::kData && present(member)) served.insert(member.node_id);
  }
  Listing scanning, absent;
  for (const std::string& node : worker_nodes(state)) {
    if (reported.contains(node)) continue;
    (served.contains(node) ? scanning : absent).add([&] { return host_of_node(state, node); });
  }
  std::string text;
  const auto append = [&](const std::string& more) { text += (text.empty() ? "" : "; ") + more; };
  if (here < expected) append(joined_so_far(state, here, expected));
  if (!scanning.empty()) {
    append(fmt::format("the data service of {} is still reading the sources", scanning.text()));
  }
  if (!absent.empty()) {
    append(fmt::format("the data service of {} has yet to join", absent.text()));
  }
  return text;
}

std::string disagreement(const MembershipState& state) {
  for (const NodeDataset& dataset : state.datasets) {
    if (!dataset.error.empty()) {
      return fmt::format("the dataset cannot be used on {}: {}",
                         host_of_node(state, dataset.node_id), dataset.error);
    }
    const NodeDataset& first = state.datasets.front();
    if (dataset.facts.fingerprint != first.facts.fingerprint) {
      return fmt::format(
          "{} and {} see different datasets (fingerprints {} and {}): data.sources must hold the "
          "same files on every node",
          host_of_node(state, first.node_id), host_of_node(state, dataset.node_id),
          first.facts.fingerprint, dataset.facts.fingerprint);
    }
  }
  return "";
}

// Workers of which some would compute on the CPU and some on GPUs, those here and the newcomer (may
// be null); empty: they do not.
std::string mixed_devices(const MembershipState& state, const Member* newcomer) {
  Listing on_cpu, on_gpu;
  const auto add = [&](const Member& member) {
    if (!is_worker(member) || !present(member) || member.device.empty()) return;
    if (member.device == "cpu") return on_cpu.add([&] { return describe(member); });
    on_gpu.add([&] { return describe(member) + ": " + member.device; });
  };
  for (const Member& member : state.members) add(member);
  if (newcomer != nullptr) add(*newcomer);
  if (on_cpu.empty() || on_gpu.empty()) return "";
  return fmt::format(
      "the workers cannot train together, as these have no GPU that they can use: {}; and these "
      "have one: {}; set run.device = \"cpu\", or start nodes of one kind only (`muster doctor` "
      "tells what a node has)",
      on_cpu.text(), on_gpu.text());
}

}  // namespace

const char* to_string(MemberRole role) {
  switch (role) {
    case MemberRole::kNode:
      return "node agent";
    case MemberRole::kData:
      return "data service";
    case MemberRole::kWorker:
      return "worker";
    case MemberRole::kObserver:
      return "observer";
  }
  return "member";
}

const char* to_string(MemberState state) {
  switch (state) {
    case MemberState::kJoining:
      return "joining";
    case MemberState::kStandby:
      return "standby";
    case MemberState::kActive:
      return "active";
    case MemberState::kDraining:
      return "draining";
    case MemberState::kGone:
      return "gone";
  }
  return "unknown";
}

const NodeDataset* dataset_of(const MembershipState& state, const std::string& node_id) {
  for (const NodeDataset& dataset : state.datasets) {
    if (dataset.node_id == node_id) return &dataset;
  }
  return nullptr;
}

int offered_workers(const MembershipState& state) {
  int sum = 0;
  for (const Member& member : state.members) {
    if (member.role == MemberRole::kNode && present(member)) sum += member.workers;
  }
  return sum;
}

int expected_workers(const MembershipState& state, const MembershipOptions& options) {
  return options.expected_workers > 0 ? options.expected_workers : offered_workers(state);
}

std::string describe(const Member& member) {
  const std::string rank =
      is_worker(member) && member.rank >= 0 ? fmt::format(" {}", member.rank) : "";
  return fmt::format("{}{} (pid {} on host {})", to_string(member.role), rank, member.pid,
                     member.host);
}

std::optional<std::string> refuse_reason(const MembershipState& state,
                                         const MembershipOptions& options, const Member& newcomer,
                                         const Member* known) {
  if (newcomer.id.empty()) return "a member must name its id";
  if (newcomer.role == MemberRole::kObserver) return std::nullopt;
  if (known != nullptr) {
    if (!present(*known)) return fmt::format("{} has already left the run", describe(*known));
    if (known->pid != newcomer.pid || known->host != newcomer.host ||
        known->role != newcomer.role) {
      return fmt::format("the member id {} belongs to {}", newcomer.id, describe(*known));
    }
    return std::nullopt;  // the same process, connected anew
  }
  if (state.running && is_worker(newcomer) && !options.cpu_only) {
    if (std::string mix = mixed_devices(state, &newcomer); !mix.empty()) return mix;
  }
  return std::nullopt;
}

void promote(double now, MembershipState* state) {
  const NodeIds reported = nodes_with_dataset(*state);
  for (Member& member : state->members) {
    if (member.state != MemberState::kJoining) continue;
    if (!is_worker(member)) {
      member.state = MemberState::kActive;
    } else if (reported.contains(member.node_id) && !member.away) {
      member.state = MemberState::kStandby;
      member.standby_since = now;
    }
  }
}

int available_workers(const MembershipState& state) {
  return static_cast<int>(std::count_if(state.members.begin(), state.members.end(), is_available));
}

int allowed_world(int workers, const MembershipState& state, const MembershipOptions& options) {
  int64_t world = std::min<int64_t>(workers, options.global_batch);
  if (options.max_workers > 0) world = std::min<int64_t>(world, options.max_workers);
  if (state.target_workers > 0) world = std::min<int64_t>(world, state.target_workers);
  const int64_t group = options.parallel.shard_group;
  if (group > 0 && options.parallel.shard != "none") world -= world % group;
  return static_cast<int>(world);
}

bool ends_without(const MembershipState& state, const MembershipOptions& options) {
  const int world = allowed_world(available_workers(state), state, options);
  return world < options.min_workers && options.wait_timeout_s == 0;
}

std::vector<std::string> choose_workers(const MembershipState& state,
                                        const MembershipOptions& options) {
  std::vector<const Member*> pool;
  for (const Member& member : state.members) {
    if (is_available(member)) pool.push_back(&member);
  }
  std::sort(pool.begin(), pool.end(), [](const Member* a, const Member* b) {
    const auto key = [](const Member* m) {
      return std::pair(m->state != MemberState::kActive, m->arrival);
    };
    return key(a) < key(b);
  });
  pool.resize(static_cast<size_t>(allowed_world(static_cast<int>(pool.size()), state, options)));
  std::vector<std::string> chosen;
  chosen.reserve(pool.size());
  for (const Member* member : pool) chosen.push_back(member->id);
  return chosen;
}

std::optional<std::string> decide_resize(double now, const MembershipState& state,
                                         const MembershipOptions& options) {
  Listing leavers;
  int active = 0;
  int standby = 0;
  double oldest = now;
  double youngest = -std::numeric_limits<double>::infinity();
  for (const Member& member : state.members) {
    if (!is_worker(member)) continue;
    if (member.state == MemberState::kDraining && member.rank >= 0) {
      leavers.add([&] { return describe(member); });
    } else if (member.state == MemberState::kActive) {
      ++active;
    } else if (member.state == MemberState::kStandby) {
      ++standby;
      oldest = std::min(oldest, member.standby_since);
      youngest = std::max(youngest, member.standby_since);
    }
  }
  const int world = allowed_world(active + standby, state, options);
  if (!leavers.empty()) return leavers.text() + " was asked to leave";
  if (world == active) return std::nullopt;
  if (world < active) return fmt::format("{} of {} workers have a place", world, active);
  const bool settled = now - youngest >= options.join_window_s ||
                       now - oldest >= kMostJoinWindows * options.join_window_s;
  if (!settled) return std::nullopt;
  return fmt::format("{} more worker{} joined", world - active, world - active == 1 ? "" : "s");
}

Decision decide_start(double now, const MembershipState& state, const MembershipOptions& options) {
  // What cannot be right is said at once, not after everybody has arrived.
  if (std::string wrong = disagreement(state); !wrong.empty()) return {Verdict::kFault, wrong};
  if (std::string mix = options.cpu_only ? "" : mixed_devices(state, nullptr); !mix.empty()) {
    return {Verdict::kFault, mix};
  }
  const int expected = expected_workers(state, options);
  if (expected > options.global_batch) {
    return {Verdict::kFault,
            fmt::format("{} workers, but train.global_batch is {}: every worker needs a sample of "
                        "each step; use fewer workers or a larger batch",
                        expected, options.global_batch)};
  }
  try {
    // Where the nodes say how many there will be, more may be on their way.
    if (options.expected_workers > 0) shard_group_size(options.parallel, expected);
  } catch (const ConfigError& error) {
    return {Verdict::kFault, error.what()};
  }
  for (const NodeDataset& dataset : state.datasets) {
    if (dataset.facts.train_samples < options.global_batch) {
      return {Verdict::kFault,
              fmt::format("the corpus is smaller than one batch: {} training samples, and "
                          "train.global_batch is {}: add text, or lower train.global_batch or "
                          "train.sequence_length",
                          dataset.facts.train_samples, options.global_batch)};
    }
  }
  std::string lacking = missing(state, options);
  if (const int world = allowed_world(count_workers(state), state, options);
      lacking.empty() && world == 0) {
    lacking = fmt::format("{} workers are fewer than parallel.shard_group = {}", expected,
                          options.parallel.shard_group);
  }
  if (lacking.empty()) return {Verdict::kStart, fmt::format("all {} workers are here", expected)};
  if (now - state.started > options.join_timeout_s) {
    const int here = allowed_world(available_workers(state), state, options);
    if (here > 0 && here >= options.min_workers) {
      return {Verdict::kStart,
              fmt::format("elastic.join_timeout_s = {:.1f} s are over, and {} suffice: {}",
                          options.join_timeout_s, here, lacking)};
    }
    return {Verdict::kFault,
            fmt::format("the run could not start within elastic.join_timeout_s = {:.1f} s: {}",
                        options.join_timeout_s, lacking)};
  }
  return {Verdict::kWait, lacking};
}

Decision decide_alive(double now, const MembershipState& state, const MembershipOptions& options) {
  const double patience = kMissedHeartbeats * options.heartbeat_s;
  for (const Member& member : state.members) {
    if (!present(member) || member.role == MemberRole::kObserver) continue;
    if (now - member.last_heard <= patience) continue;
    // When a node dies all its processes fall silent, and the first whose patience runs out may be
    // any of them.
    const Member* agent = agent_of(state, member.node_id);
    const bool node_lost =
        agent != nullptr && now - agent->last_heard > (kMissedHeartbeats - 1) * options.heartbeat_s;
    const Member& lost = node_lost ? *agent : member;
    return {Verdict::kFault,
            fmt::format("{} has been silent for {:.1f} s", describe(lost), now - lost.last_heard),
            lost.id};
  }
  return {};
}

bool is_silent(double now, const Member& member, const MembershipOptions& options) {
  return now - member.last_heard > 2 * options.heartbeat_s;
}

std::vector<std::string> rank_order(const std::vector<std::string>& chosen,
                                    const MembershipState& state) {
  const std::vector<std::string> nodes = worker_nodes(state);
  std::unordered_map<std::string_view, size_t> node_order;
  for (size_t i = 0; i < nodes.size(); ++i) node_order[nodes[i]] = i;
  const std::unordered_set<std::string_view> wanted(chosen.begin(), chosen.end());
  std::vector<const Member*> workers;
  for (const Member& member : state.members) {
    if (is_worker(member) && wanted.contains(member.id)) workers.push_back(&member);
  }
  std::sort(workers.begin(), workers.end(), [&](const Member* a, const Member* b) {
    return std::pair(node_order[a->node_id], a->arrival) <
           std::pair(node_order[b->node_id], b->arrival);
  });
  std::vector<std::string> ids;
  ids.reserve(workers.size());
  for (const Member* worker : workers) ids.push_back(worker->id);
  return ids;
}

void give_ranks(double now, const std::vector<std::string>& ids, MembershipState* state) {
  std::unordered_map<std::string_view, int32_t> ranks;
  for (const std::string& id : ids) ranks.emplace(id, static_cast<int32_t>(ranks.size()));
  for (Member& member : state->members) {
    if (!is_worker(member)) continue;
    if (const auto found = ranks.find(member.id); found != ranks.end()) {
      member.rank = found->second;
      member.state = MemberState::kActive;
      member.assigned = true;
      continue;
    }
    if (present(member)) member.rank = -1;
    if (member.state == MemberState::kActive) {
      member.state = MemberState::kStandby;
      member.standby_since = now;
    }
  }
}

}  // namespace muster
