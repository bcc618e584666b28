// Learning rate as a function of the step alone (training contract, item 2).
#pragma once

#include <cstdint>

#include "common/config/config.h"

namespace muster {

// Rate of step `step` (from 1) of `total_steps`, starting from `peak`. Linear warm-up reaches
// `peak` at step warmup_steps; then
//   cosine, linear: down to peak · min_lr_ratio at the last step;
//   wsd: constant, then linear over the last decay_steps (0 = a tenth of the run) down to peak ·
//   min_lr_ratio; constant: constant.
double learning_rate(const ScheduleConfig& schedule, double peak, int64_t step,
                     int64_t total_steps);

}  // namespace muster
