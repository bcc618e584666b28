// What an AdamW update multiplies with and the host knows, shared by the CPU and the GPU so that
// both round alike. The rest comes from StepControl.
#pragma once

#include "kernels/adamw/adamw.h"

namespace muster {

struct AdamwConstants {
  float beta1, beta2;
  float one_minus_beta1, one_minus_beta2;
  float eps;

  explicit AdamwConstants(const AdamwOptions& options)
      : beta1(static_cast<float>(options.beta1)),
        beta2(static_cast<float>(options.beta2)),
        one_minus_beta1(static_cast<float>(1.0 - options.beta1)),
        one_minus_beta2(static_cast<float>(1.0 - options.beta2)),
        eps(static_cast<float>(options.eps)) {}
};

}  // namespace muster
