#include "worker/agent/node_processes.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <csignal>
#include <filesystem>

#include "common/check.h"
#include "common/identity.h"
#include "common/openmp.h"
#include "worker/agent/agent.h"

namespace muster {

void NodeProcesses::start(int slot, int workers) {
  MUSTER_CHECK(!runs(slot));
  const bool data = slot == kDataSlot;
  const std::string member_id = random_id();
  // The host in the name keeps apart the nodes that share a run directory, the id those that share
  // a host.
  const std::string log =
      fmt::format("{}/{}-{}-{}.log", options_.log_dir, host_name(), options_.node_id.substr(0, 4),
                  data ? "data" : fmt::format("worker-{}", slot));
  ChildOptions child{.name = data ? "data service" : fmt::format("worker {}", slot),
                     .argv = {options_.program, data ? "data" : "worker"},
                     .environment = {},
                     .output_path = log};
  if (!data) {
    child.argv.insert(child.argv.end(), {"--workers-on-node", std::to_string(workers),
                                         "--local-rank", std::to_string(slot)});
    child.environment.merge(openmp_environment());
  }
  child.argv.insert(child.argv.end(), {"--coordinator", options_.coordinator, "--node-id",
                                       options_.node_id, "--member-id", member_id});
  if (options_.security.enabled()) child.environment[kRunKeyVariable] = options_.security.run_key;
  std::error_code missing;
  const uint64_t size = std::filesystem::file_size(log, missing);
  const auto [process, added] = processes_.emplace(slot, Process{.member_id = member_id,
                                                                 .log = log,
                                                                 .log_begin = missing ? 0 : size,
                                                                 .started = Deadline::Clock::now(),
                                                                 .child = Child::spawn(child)});
  spdlog::info("started {} (pid {}), log {}", child.name, process->second.child.pid(), log);
}

int NodeProcesses::workers() const {
  return static_cast<int>(processes_.size()) - (runs(kDataSlot) ? 1 : 0);
}

std::vector<NodeExit> NodeProcesses::take_exits() {
  std::vector<NodeExit> exits;
  for (auto entry = processes_.begin(); entry != processes_.end();) {
    auto& [slot, process] = *entry;
    const auto status = process.child.try_wait();
    if (!status) {
      ++entry;
      continue;
    }
    const std::chrono::duration<double> lived = Deadline::Clock::now() - process.started;
    exits.push_back({.slot = slot,
                     .role = slot == kDataSlot ? proto::ROLE_DATA : proto::ROLE_WORKER,
                     .name = process.child.name(),
                     .member_id = process.member_id,
                     .pid = process.child.pid(),
                     .status = *status,
                     .lived_s = lived.count(),
                     .log = process.log,
                     .log_begin = process.log_begin});
    entry = processes_.erase(entry);
  }
  return exits;
}

std::string NodeProcesses::living() {
  std::string names;
  for (auto& [slot, process] : processes_) {
    if (process.child.try_wait()) continue;
    names += fmt::format("{}{} (pid {})", names.empty() ? "" : ", ", process.child.name(),
                         process.child.pid());
  }
  return names;
}

void NodeProcesses::kill(const std::string& member_id, const std::string& reason) {
  for (auto& [slot, process] : processes_) {
    if (process.member_id != member_id || process.child.try_wait()) continue;
    spdlog::warn("killing {} (pid {}): {}", process.child.name(), process.child.pid(), reason);
    process.child.signal(SIGKILL);
  }
}

void NodeProcesses::end(std::chrono::duration<double> grace) {
  const Deadline deadline = Deadline::after(grace);
  for (auto& [slot, process] : processes_) process.child.signal(SIGTERM);
  for (auto& [slot, process] : processes_) {
    if (!process.child.wait(deadline)) process.child.kill();
  }
}

void NodeProcesses::kill_all() {
  for (auto& [slot, process] : processes_) process.child.signal(SIGKILL);
  for (auto& [slot, process] : processes_) process.child.kill();
}

}  // namespace muster
