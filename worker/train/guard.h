// What the host says about updates that were left out because their loss or gradient was not
// finite, or because their loss spiked (kernels/step_control decides).
#pragma once

#include <string>

#include "common/config/config.h"
#include "kernels/step_control/step_control.h"

namespace muster {

// Why the step decided last was skipped; "" when it was applied.
std::string skip_reason(const TrainConfig& train, const StepControl& control);

// Throws Error when more than train.max_skips updates in a row were skipped.
void check_skips(const TrainConfig& train, const StepControl& control);

}  // namespace muster
