// Who takes part in the run, and what follows from it. Pure: the state is a value, time is passed
// in as seconds, and a decision comes with its reason; the event loop applies it.
//
// A worker is joining (said hello) → standby (its node's dataset is known too) → active (has a rank
// in the generation) → draining (told to leave, or asked for it) → gone. One that a generation has
// no place for goes back from active to standby. Data services, node agents and observers go from
// joining straight to active.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/config/config.h"
#include "common/protocol/heartbeat.h"
#include "coordinator/checkpoints.h"

namespace muster {

enum class MemberRole { kNode, kData, kWorker, kObserver };
enum class MemberState { kJoining, kStandby, kActive, kDraining, kGone };

// "worker", "data service", "node agent", "observer".
const char* to_string(MemberRole role);
const char* to_string(MemberState state);

struct Member {
  std::string id;
  std::string peer;  // routing id of its connection; empty: it is not heard yet
  MemberRole role = MemberRole::kWorker;
  MemberState state = MemberState::kJoining;
  std::string node_id;  // a node agent's own id
  std::string host;
  int32_t pid = 0;
  int32_t rank = -1;     // of a worker that is or was active
  int32_t workers = 0;   // of a node agent: how many it brought
  int32_t planned = 0;   // of a node agent: workers that run there, or that it starts by itself
  int32_t asked = 0;     // beside these: by StartWorkers, in all
  int32_t heeded = 0;    // of `asked`, those that `planned` counts already
  int32_t unwanted = 0;  // of those that are not here yet: nobody needs them any more
  std::string device;    // of a worker: "cpu", or the GPU that it would take; "": not told
  int64_t arrival = 0;   // order of the hellos
  // Of a node agent, seconds: after too many crashes it starts nothing.
  double set_aside_until = 0.0;
  double last_heard = 0.0;     // seconds
  double standby_since = 0.0;  // seconds
  bool assigned = false;       // of a worker: may hold state, and wait in collectives
  bool away = false;           // of a worker that is not: was halted, and has yet to say so
  int64_t link_errors = 0;     // of a worker: lost connections to workers that live
};

// What a node's data service said about the dataset.
struct NodeDataset {
  std::string node_id;
  DatasetFacts facts;
  std::string endpoint;
  std::string error;  // not empty: the sources cannot be used
};

struct MembershipState {
  std::vector<Member> members;  // in order of arrival; those that are gone stay for the record
  std::vector<NodeDataset> datasets;
  double started = 0.0;    // seconds
  bool running = false;    // a generation was assigned
  int target_workers = 0;  // what `muster scale` asked for; 0: nothing
};

struct MembershipOptions {
  int expected_workers = 0;  // 0: what the node agents bring
  double join_timeout_s = 0.0;
  double heartbeat_s = 0.0;
  int64_t global_batch = 0;
  bool cpu_only = false;  // run.device = "cpu": what GPUs the workers could take does not matter
  ParallelConfig parallel = {};
  int min_workers = 1;
  int max_workers = 0;  // 0: as many as the batch has samples
  double wait_timeout_s = 0.0;
  double join_window_s = 0.0;
};

// What the node's data service reported; null: nothing yet.
const NodeDataset* dataset_of(const MembershipState& state, const std::string& node_id);

// How many workers the nodes that are here bring.
int offered_workers(const MembershipState& state);

// How many workers the run is for; 0: not known yet.
int expected_workers(const MembershipState& state, const MembershipOptions& options);

// "worker 1 (pid 4242 on host h)", "data service (pid …)".
std::string describe(const Member& member);

// Whether a newcomer may join; the reason why not, or nothing. `known`: who has its id already, or
// null.
std::optional<std::string> refuse_reason(const MembershipState& state,
                                         const MembershipOptions& options, const Member& newcomer,
                                         const Member* known);

// The state with every joining worker whose node's dataset is known, and that is not away, on
// standby.
void promote(double now, MembershipState* state);

// Workers that a generation may have: in it or on standby.
int available_workers(const MembershipState& state);
// The largest world of at most `workers` that the batch, max_workers, the target of `muster scale`
// and parallel.shard_group allow; 0: none does.
int allowed_world(int workers, const MembershipState& state, const MembershipOptions& options);
// Whether a run that has lost workers and has these left is over, rather than waiting for more.
bool ends_without(const MembershipState& state, const MembershipOptions& options);

// Who the next generation consists of: those that are in the present one first, then those on
// standby, each in order of arrival. Empty: nobody can.
std::vector<std::string> choose_workers(const MembershipState& state,
                                        const MembershipOptions& options);
// Whether the generation is to change while it trains; the reason, or nothing. Joins wait until no
// other one has followed for join_window_s, at most four times as long.
std::optional<std::string> decide_resize(double now, const MembershipState& state,
                                         const MembershipOptions& options);

enum class Verdict { kWait, kStart, kFault };
struct Decision {
  Verdict verdict = Verdict::kWait;
  std::string reason;          // kWait: what is waited for; kFault: what is wrong and what to do
  std::string member_id = {};  // kFault of decide_alive: who fell silent
};
// Before the first generation: whether it can start.
Decision decide_start(double now, const MembershipState& state, const MembershipOptions& options);
// At any time: whether somebody fell silent.
Decision decide_alive(double now, const MembershipState& state, const MembershipOptions& options);

// Whether a member says nothing (any more), though it is not lost yet: a run that fails does not
// wait for it.
bool is_silent(double now, const Member& member, const MembershipOptions& options);

// The chosen workers in the order of their ranks: by node (in order of the nodes' first arrival),
// then by arrival; in whatever order they are given. So the workers of a node are neighbours, as
// parallel.shard_group wants them.
std::vector<std::string> rank_order(const std::vector<std::string>& chosen,
                                    const MembershipState& state);
// Makes these workers active, with ranks from 0 on in their order. Active ones that are not among
// them go on standby; who is not active has rank -1.
void give_ranks(double now, const std::vector<std::string>& ids, MembershipState* state);

}  // namespace muster
