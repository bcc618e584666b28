// The processes of a node: one data service and its workers, each in a slot of its own.
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "common/process.h"
#include "common/transport/transport.h"

namespace muster {

struct NodeProcessOptions {
  std::string program;      // path of muster
  std::string coordinator;  // endpoint
  Security security;        // handed on in the environment (kRunKeyVariable), never in argv
  std::string node_id;
  std::string log_dir;  // one file a slot
};

// The data service's slot; a worker's is its local rank.
inline constexpr int kDataSlot = -1;

// A process that has ended.
struct NodeExit {
  int slot;
  proto::Role role;
  std::string name;       // "worker 1"
  std::string member_id;  // as it told the coordinator
  pid_t pid;
  ExitStatus status;
  double lived_s;
  std::string log;     // path
  uint64_t log_begin;  // where this process's part of it begins
};

class NodeProcesses {
 public:
  explicit NodeProcesses(NodeProcessOptions options) : options_(std::move(options)) {}
  // Starts a process under a new member id in a slot in which none runs. `workers` is how many this
  // node is to have, this one included: they share its cores. Throws IoError.
  void start(int slot, int workers);
  bool runs(int slot) const { return processes_.contains(slot); }
  int workers() const;  // that run, or whose end has not been returned
  // The ends that have not been returned yet; their slots are free from then on.
  std::vector<NodeExit> take_exits();
  // Whether no process is left whose end has not been returned.
  bool empty() const { return processes_.empty(); }
  // "data service (pid 11), worker 0 (pid 12)": those that still run.
  std::string living();
  // SIGKILL to one of them, if it is ours and still runs, for `reason`; its end is not waited for.
  void kill(const std::string& member_id, const std::string& reason);
  // SIGTERM to all; SIGKILL to what is left after `grace`.
  void end(std::chrono::duration<double> grace);
  // SIGKILL to all: none of them can tell the coordinator anything any more.
  void kill_all();

 private:
  struct Process {
    std::string member_id;
    std::string log;
    uint64_t log_begin;
    Deadline::Clock::time_point started;
    Child child;
  };

  const NodeProcessOptions options_;
  std::map<int, Process> processes_;  // by slot
};

}  // namespace muster
