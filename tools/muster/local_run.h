// A whole run on this machine: a coordinator and a node agent as children, watched until both have
// ended. An agent or a coordinator that is killed is started anew, with the limits that the agent
// has for its children.
#pragma once

#include <string>
#include <vector>

#include "common/config/config.h"
#include "common/transport/transport.h"

namespace muster {

struct LocalRunOptions {
  std::string config_path;
  std::vector<std::string> overrides;
  Config config;  // as read from both
  int workers = 1;
  Security security;           // empty: none, on loopback
  std::string resume_command;  // what to tell the user
};

// Returns 0 when the run ended well: all its steps done, or stopped on request with its state
// saved. Prints progress, the reason of the end, and how to resume. Throws Error when the run could
// not be started.
int run_locally(const LocalRunOptions& options);

}  // namespace muster
