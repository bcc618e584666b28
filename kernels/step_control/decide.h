// The decision itself, the same arithmetic on the CPU and on a GPU.
#pragma once

#include <cmath>

#include "common/host_device.h"
#include "kernels/step_control/step_control.h"

namespace muster {

// base^exponent by squaring: multiplications alone round alike everywhere, which a library's pow
// does not.
MUSTER_HOST_DEVICE inline double whole_power(double base, int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent /= 2) {
    if (exponent % 2 == 1) result *= base;
    base *= base;
  }
  return result;
}

MUSTER_HOST_DEVICE inline SkipReason skip_reason(const StepControl& control,
                                                 const StepRules& rules) {
  if (!std::isfinite(control.loss)) return SkipReason::kLossNotFinite;
  if (rules.spike_factor > 0 && control.updates > 0 &&
      control.loss > rules.spike_factor * control.loss_mean) {
    return SkipReason::kLossSpike;
  }
  return std::isfinite(control.grad_norm) ? SkipReason::kNone : SkipReason::kGradNormNotFinite;
}

MUSTER_HOST_DEVICE inline StepControl decide(StepControl control, const double* sums,
                                             const StepRules& rules) {
  const double tokens = sums[2];
  control.tokens += static_cast<int64_t>(tokens);
  control.step_tokens = tokens;
  control.loss = sums[1] / tokens;
  control.grad_norm = std::sqrt(sums[0]) / tokens;
  control.loss_mean_before = control.loss_mean;
  control.reason = skip_reason(control, rules);
  control.apply = control.reason == SkipReason::kNone ? 1 : 0;
  if (control.apply == 0) {
    ++control.skips_in_row;
    return control;
  }
  control.skips_in_row = 0;
  // An explicit fma, so that no compiler chooses.
  control.loss_mean = control.updates == 0 ? control.loss
                                           : std::fma(kLossMeanDecay, control.loss,
                                                      (1.0 - kLossMeanDecay) * control.loss_mean);
  ++control.updates;
  const bool clip = rules.clip_norm > 0 && control.grad_norm > rules.clip_norm;
  const double factor = clip ? rules.clip_norm / control.grad_norm : 1.0;
  control.grad_scale = static_cast<float>(factor / tokens);
  // In double: 1 − β2^updates loses most of its digits in float32.
  control.step_size =
      static_cast<float>(rules.lr / (1.0 - whole_power(rules.beta1, control.updates)));
  control.inverse_root_correction =
      static_cast<float>(1.0 / std::sqrt(1.0 - whole_power(rules.beta2, control.updates)));
  return control;
}

}  // namespace muster
