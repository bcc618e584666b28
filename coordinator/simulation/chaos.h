// A run of a simulated cluster with random faults and changes of size, from one seed; and the check
// that it comes to its end with every sample in one committed step.
#pragma once

#include <cstdint>
#include <string>

namespace muster::simulation {

struct ChaosOutcome {
  std::string violation;  // empty: all is as it should be. With the last events before it
  int64_t steps = 0;
  uint64_t generations = 0;
  int64_t faults = 0;  // that were done to the cluster
  double simulated_s = 0.0;
};

// A violation tells so many of the last events.
ChaosOutcome run_chaos(uint64_t seed, size_t kept_traces = 60);

}  // namespace muster::simulation
