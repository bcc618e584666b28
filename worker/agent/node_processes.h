// The processes of a node: one data service and its workers.
#pragma once

#include <chrono>
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
  std::string log_dir;  // one file a process
  int workers = 1;
};

// A process that has ended.
struct NodeExit {
  proto::Role role;
  std::string name;       // "worker 1"
  std::string member_id;  // as it told the coordinator
  pid_t pid;
  ExitStatus status;
  std::string log;  // path
};

class NodeProcesses {
 public:
  // Starts them all. Throws IoError; what was started by then is killed.
  explicit NodeProcesses(const NodeProcessOptions& options);
  // The ends that have not been returned yet.
  std::vector<NodeExit> take_exits();
  bool all_ended();
  // "worker 0 (pid 12), data service (pid 11)": those that still run.
  std::string living();
  // SIGKILL to one of them, if it is ours and still runs: for those that do not react.
  void kill(const std::string& member_id);
  // SIGTERM to all; SIGKILL to what is left after `grace`.
  void end(std::chrono::duration<double> grace);

 private:
  struct Process {
    proto::Role role;
    std::string member_id;
    std::string log;
    Child child;
    bool taken = false;
  };
  void start(const NodeProcessOptions& options, proto::Role role, const std::string& name,
             const std::string& log_name, const std::vector<std::string>& arguments);

  std::vector<Process> processes_;
};

}  // namespace muster
