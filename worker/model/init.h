// Standard deviations of the initial weights.
#pragma once

#include <cmath>

#include "common/config/config.h"

namespace muster {

// Of the two products of a block that write to the residual stream: scaled by 1 / √(2 · layers), so
// that the stream's variance does not grow with depth (Radford et al., 2019; used for Llama models
// too).
inline double residual_init_std(const ModelConfig& config) {
  return config.init_std / std::sqrt(2.0 * static_cast<double>(config.layers));
}

}  // namespace muster
