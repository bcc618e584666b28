// A worker process: joins the run, trains in the generations it is assigned to, and leaves.
#pragma once

#include <cstdint>
#include <string>

#include "common/transport/transport.h"

namespace muster {

struct WorkerOptions {
  std::string coordinator;  // endpoint
  Security security;
  std::string member_id;    // "" = a random one
  std::string node_id;      // the node agent's member id, "" when run by hand
  int workers_on_node = 1;  // shares the node's cores
  int local_rank = 0;       // among them: takes the GPU of that number
  double connect_timeout_s = 30.0;
  bool watch_signals =
      true;  // SIGTERM asks to leave; off where several workers share a process (tests)
};

// Returns 0 when the run ended well, 1 after a fault (which the coordinator has been told, unless
// it is the coordinator that is gone).
int run_worker(const WorkerOptions& options);

// Throws ConfigError when parallel.threads is so far above the machine's cores that the threads
// would do little but wait for one another.
void check_threads(int64_t threads, int cores);

}  // namespace muster
