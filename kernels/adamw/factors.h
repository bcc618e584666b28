// What an AdamW update multiplies with, shared by the CPU and the GPU so that both round alike.
#pragma once

#include <cmath>

#include "kernels/adamw/adamw.h"

namespace muster {

struct AdamwFactors {
  float grad_scale;
  float beta1, beta2;
  float one_minus_beta1, one_minus_beta2;
  float step_size;                // lr / (1 − β1^step)
  float inverse_root_correction;  // 1 / √(1 − β2^step)
  float eps;
};

// What the bias corrections need of double precision is done once, here: 1 − β2^step loses most of
// its digits in float32.
inline AdamwFactors adamw_factors(const AdamwOptions& options) {
  const double step = static_cast<double>(options.step);
  return {
      .grad_scale = static_cast<float>(options.grad_scale),
      .beta1 = static_cast<float>(options.beta1),
      .beta2 = static_cast<float>(options.beta2),
      .one_minus_beta1 = static_cast<float>(1.0 - options.beta1),
      .one_minus_beta2 = static_cast<float>(1.0 - options.beta2),
      .step_size = static_cast<float>(options.lr / (1.0 - std::pow(options.beta1, step))),
      .inverse_root_correction =
          static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(options.beta2, step))),
      .eps = static_cast<float>(options.eps),
  };
}

}  // namespace muster
