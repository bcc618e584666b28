#include "worker/train/micro_batches.h"

#include "common/check.h"
#include "common/slice.h"

namespace muster {

int64_t pass_count(int64_t global_samples, int world_size, int64_t micro_batch) {
  const int64_t largest = (global_samples + world_size - 1) / world_size;
  return (largest + micro_batch - 1) / micro_batch;
}

std::vector<std::vector<int64_t>> cut(const std::vector<int64_t>& samples, int64_t passes) {
  MUSTER_CHECK(passes > 0 || samples.empty());
  std::vector<std::vector<int64_t>> batches;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const auto [begin, end] = slice_of(static_cast<int64_t>(samples.size()), pass, passes);
    batches.emplace_back(samples.begin() + begin, samples.begin() + end);
  }
  return batches;
}

}  // namespace muster
