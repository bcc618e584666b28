// Choosing the next token from its logits.
#pragma once

#include <cstdint>
#include <vector>

#include "common/rng.h"

namespace muster {

struct SamplingOptions {
  double temperature = 1.0;  // logits are divided by it; 0 = always the likeliest token
  int64_t top_k = 0;         // only the k likeliest tokens (and ties with the last); 0 = all
};

// The token drawn from softmax(logits / temperature) with random number `draw` of `rng`.
int32_t sample_token(const std::vector<float>& logits, const SamplingOptions& options,
                     const CounterRng& rng, uint64_t draw);

}  // namespace muster
