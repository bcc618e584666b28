// Keeps one bad batch from ruining a run: an update whose loss or gradient is not finite, or whose
// loss spikes, is left out. A pure function of the reduced values, so that every rank decides
// alike.
#pragma once

#include <string>

#include "common/config/config.h"
#include "worker/checkpoint/checkpoint.h"

namespace muster {

struct GuardDecision {
  bool apply = true;
  std::string reason;  // why not
};

// Before the update. `progress.loss_mean` is the running mean of applied losses (0 before the
// first).
GuardDecision judge_loss(const TrainConfig& train, const TrainingProgress& progress, double loss);

// After the update: the progress that follows. Throws Error when more than train.max_skips updates
// in a row were skipped, with `reason`.
TrainingProgress advance(const TrainConfig& train, TrainingProgress progress, double loss,
                         int64_t tokens, bool applied, const std::string& reason);

}  // namespace muster
