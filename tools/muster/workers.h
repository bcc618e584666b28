// How many workers a machine gets when nobody says.
#pragma once

#include "common/config/config.h"

namespace muster {

// One per GPU, where run.device lets GPUs be used and there are any; else one per two CPU cores.
int workers_of_machine(const RunConfig& run);

// For a run on this machine: parallel.workers, or workers_of_machine() as far as the config allows.
// Throws ConfigError when run.device = "cuda" and there is no GPU, or fewer GPUs than workers.
int workers_for_run(const Config& config);

}  // namespace muster
