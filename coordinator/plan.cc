#include "coordinator/plan.h"

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

int64_t planning_window(double step_s) {
  constexpr double kLongStep = 1.0;
  return step_s > kLongStep ? 2 : 4;
}

}  // namespace muster
