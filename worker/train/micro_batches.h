// How one worker's samples of a step become forward passes.
#pragma once

#include <cstdint>
#include <vector>

namespace muster {

// Passes that every rank makes for `global_samples` dealt to `world_size` workers: what the largest
// slice needs. Collectives inside a pass demand the same number everywhere.
int64_t pass_count(int64_t global_samples, int world_size, int64_t micro_batch);

// `samples` cut into exactly `passes` contiguous near-equal micro-batches; some are empty if there
// are fewer samples.
std::vector<std::vector<int64_t>> cut(const std::vector<int64_t>& samples, int64_t passes);

}  // namespace muster
