// The node agent: starts a node's data service and workers, reports their ends to the coordinator
// at once, and sees that none of them stays behind.
#pragma once

#include <string>

#include "common/transport/transport.h"

namespace muster {

// The environment variable that hands a run key to a process; a command line would show it to
// everybody.
inline constexpr const char* kRunKeyVariable = "MUSTER_RUN_KEY";

// Begins each line that the agent's log quotes from the log of a process that failed.
inline constexpr const char* kQuotedLogPrefix = "  | ";

struct AgentOptions {
  std::string coordinator;  // endpoint
  Security security;
  int workers = 0;      // 0: default_workers()
  std::string program;  // the muster program to start; "": this one
  double connect_timeout_s = 30.0;
};

// Workers for a machine with `cores` cores: one for two of them, at least one.
int default_workers(int cores);
// The same for this machine, by the cores that this process may use.
int default_workers();

// Starts `muster data` and the workers as children, with their output in RUN_DIR/logs, and stays
// until they have ended and the coordinator has said so. Returns 0 when the run ended well or this
// node was let go, 1 after a fault. A child that crashes while the run goes on is started anew, see
// restart_policy.h; one that ends with status 0 is not. SIGTERM, SIGINT and SIGUSR1 become the wish
// to leave, which the coordinator grants once the node's workers have handed their state over; what
// still runs after elastic.collective_timeout_s, or elastic.shutdown_timeout_s after the
// coordinator's Stop, or at a second such signal, is killed, and so is at once what the coordinator
// calls silent. A coordinator that falls silent for longer than members wait for it is a fault, for
// which the children end by themselves; after elastic.collective_timeout_s they are killed. Throws
// PeerError or TimeoutError when the coordinator cannot be reached or refuses us. Call it from the
// main thread: children die with the thread that starts them.
int run_agent(const AgentOptions& options);

}  // namespace muster
