#include "coordinator/plan.h"

#include <algorithm>
#include <cmath>

namespace muster {

StepFlags step_flags(int64_t step, const PlanOptions& options, bool leave) {
  StepFlags flags;
  const bool finish = step >= options.total_steps;
  flags.last = leave || finish;
  flags.save = flags.last || (options.save_every > 0 && step % options.save_every == 0);
  // A finished run ends with a fresh held-out loss; one that was asked to leave should not be kept
  // by it.
  flags.evaluate =
      options.has_held_out && options.eval_every > 0 && (step % options.eval_every == 0 || finish);
  return flags;
}

int64_t mirror_interval(int64_t configured, double mirror_s, double step_s) {
  constexpr double kMostShare = 0.02;
  constexpr double kLongest = 1000.0;
  if (configured >= 0) return configured;
  const double unmirrored_s = step_s - mirror_s;
  if (mirror_s <= 0 || step_s <= 0) return 1;
  if (unmirrored_s <= 0) return static_cast<int64_t>(kLongest);
  return static_cast<int64_t>(
      std::clamp(std::ceil(mirror_s / (kMostShare * unmirrored_s)), 1.0, kLongest));
}

int64_t planning_window(double step_s) {
  constexpr double kLongStep = 1.0;
  return step_s > kLongStep ? 2 : 4;
}

}  // namespace muster
