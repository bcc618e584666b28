// Checkpoints of workers that had nobody to report to: when the coordinator stays away for longer
// than elastic.coordinator_timeout_s, each worker saves its part of the state beside a
// proto::Farewell, and leaves.
#pragma once

#include "common/run_dir.h"

namespace muster {

// Makes a checkpoint of the newest state that was left behind whole, and writes down what its
// workers reported meanwhile. Does nothing where a checkpoint is as new, or where steps before it
// are reported by nobody. What is wrong with one is logged, and where this is cut short it can be
// called again. The rest stays for remove_partials().
void adopt_left_behind(const RunDir& run);

}  // namespace muster
