#include "worker/agent/node_processes.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <csignal>

#include "common/identity.h"
#include "common/openmp.h"
#include "worker/agent/agent.h"

namespace muster {

NodeProcesses::NodeProcesses(const NodeProcessOptions& options) {
  // The host in the name keeps apart the nodes that share a run directory, the id those that share
  // a host.
  const std::string node = host_name() + "-" + options.node_id.substr(0, 4);
  start(options, proto::ROLE_DATA, "data service", node + "-data", {"data"});
  for (int i = 0; i < options.workers; ++i) {
    start(options, proto::ROLE_WORKER, fmt::format("worker {}", i),
          fmt::format("{}-worker-{}", node, i),
          {"worker", "--workers-on-node", std::to_string(options.workers), "--local-rank",
           std::to_string(i)});
  }
}

void NodeProcesses::start(const NodeProcessOptions& options, proto::Role role,
                          const std::string& name, const std::string& log_name,
                          const std::vector<std::string>& arguments) {
  const std::string member_id = random_id();
  ChildOptions child{.name = name,
                     .argv = {options.program},
                     .environment = {},
                     .output_path = fmt::format("{}/{}.log", options.log_dir, log_name)};
  child.argv.insert(child.argv.end(), arguments.begin(), arguments.end());
  for (const std::string& argument :
       {std::string("--coordinator"), options.coordinator, std::string("--node-id"),
        options.node_id, std::string("--member-id"), member_id}) {
    child.argv.push_back(argument);
  }
  if (options.security.enabled()) {
    child.environment[kRunKeyVariable] = options.security.run_key;
  }
  if (role == proto::ROLE_WORKER) child.environment.merge(openmp_environment());
  processes_.push_back(Process{role, member_id, child.output_path, Child::spawn(child)});
  spdlog::info("started {} (pid {}), log {}", name, processes_.back().child.pid(),
               child.output_path);
}

std::vector<NodeExit> NodeProcesses::take_exits() {
  std::vector<NodeExit> exits;
  for (Process& process : processes_) {
    if (process.taken) continue;
    const auto status = process.child.try_wait();
    if (!status) continue;
    process.taken = true;
    exits.push_back({process.role, process.child.name(), process.member_id, process.child.pid(),
                     *status, process.log});
  }
  return exits;
}

bool NodeProcesses::all_ended() {
  bool ended = true;
  for (Process& process : processes_) ended = process.child.try_wait().has_value() && ended;
  return ended;
}

std::string NodeProcesses::living() {
  std::string names;
  for (Process& process : processes_) {
    if (process.child.try_wait()) continue;
    names += fmt::format("{}{} (pid {})", names.empty() ? "" : ", ", process.child.name(),
                         process.child.pid());
  }
  return names;
}

void NodeProcesses::kill(const std::string& member_id) {
  for (Process& process : processes_) {
    if (process.member_id != member_id || process.child.try_wait()) continue;
    spdlog::warn("killing {} (pid {}), which does not answer", process.child.name(),
                 process.child.pid());
    process.child.kill();
  }
}

void NodeProcesses::end(std::chrono::duration<double> grace) {
  const Deadline deadline = Deadline::after(grace);
  for (Process& process : processes_) process.child.signal(SIGTERM);
  for (Process& process : processes_) {
    if (!process.child.wait(deadline)) process.child.kill();
  }
}

}  // namespace muster
