// The run's control plane: admits members, assigns ranks, plans the steps, commits checkpoints,
// keeps the journal and answers for the run's state. Touches neither tensors nor sample bytes.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "common/config/config.h"
#include "common/transport/transport.h"

namespace muster {

struct CoordinatorOptions {
  Config config;
  std::string listen = "tcp://127.0.0.1:0";
  // Empty: none on this machine alone; the run's key file (made if missing) where `listen` reaches
  // beyond it.
  Security security;
  // 0: parallel.workers, or where that is 0 too, what the first node agent brings.
  int expected_workers = 0;
  // What a person types to go on with the run after a fault; empty: muster train
  // RUN_DIR/config.toml.
  std::string resume_command;
  // Goes on with the run of a coordinator that was killed in this run directory, with the members
  // that come back. Where none is left, five heartbeats pass before the run starts.
  bool rejoin = true;
  // SIGINT and SIGTERM: once = finish what is planned, save, leave; twice = leave now.
  bool handle_signals = true;
  // Called with the endpoint once peers may connect.
  std::function<void(const std::string& endpoint)> on_listening;
};

// RUN_DIR of a config, absolute: run.dir, or runs/NAME under the working directory.
std::string run_dir_of(const Config& config);

// Why a run of this config would have nothing to do: its newest checkpoint is the end of it
// already. Nothing: there is something to do. Throws as run_coordinator where the run cannot be
// resumed.
std::optional<std::string> nothing_to_do(const Config& config);

// Runs until the run is over; where there is nothing to do, says so and returns 0 without waiting
// for anybody. Returns 0 when it ended well (all steps done, or stopped on request
// with its state saved) and 1 after a fault; the reason is logged, in events.jsonl and in the last
// Status. Throws before anybody is admitted: ConfigError (a used run directory with run.resume =
// "never", workers above the batch), CheckpointError (of another model; none where run.resume =
// "must"), IoError (run directory), PeerError (address in use, another coordinator is at work in
// the run directory).
int run_coordinator(const CoordinatorOptions& options);

}  // namespace muster
