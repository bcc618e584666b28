#include "kernels/step_control/decide.h"

namespace muster::cpu {

void decide_step(const Stream&, TensorView control, ConstTensorView sums, const StepRules& rules) {
  auto* state = static_cast<StepControl*>(control.raw());
  *state = decide(*state, sums.data<double>(), rules);
}

}  // namespace muster::cpu
