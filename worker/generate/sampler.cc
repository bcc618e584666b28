#include "worker/generate/sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "common/check.h"

namespace muster {
namespace {

// The smallest logit that may still be drawn.
float cutoff(const std::vector<float>& logits, int64_t top_k) {
  const auto k = static_cast<size_t>(top_k);
  if (k == 0 || k >= logits.size()) return *std::min_element(logits.begin(), logits.end());
  std::vector<float> sorted = logits;
  const auto last = sorted.begin() + static_cast<std::ptrdiff_t>(k) - 1;
  std::nth_element(sorted.begin(), last, sorted.end(), std::greater<>());
  return *last;
}

}  // namespace

int32_t sample_token(const std::vector<float>& logits, const SamplingOptions& options,
                     const CounterRng& rng, uint64_t draw) {
  MUSTER_CHECK(!logits.empty() && options.temperature >= 0 && options.top_k >= 0);
  const auto likeliest = std::max_element(logits.begin(), logits.end());
  if (options.temperature == 0) return static_cast<int32_t>(likeliest - logits.begin());

  const float lowest = cutoff(logits, options.top_k);
  std::vector<double> cumulative(logits.size());
  double sum = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] >= lowest) {
      sum += std::exp((static_cast<double>(logits[i]) - *likeliest) / options.temperature);
    }
    cumulative[i] = sum;
  }
  // The first token whose cumulative weight exceeds the point: never one of weight zero.
  const auto drawn =
      std::upper_bound(cumulative.begin(), cumulative.end(), rng.uniform(draw) * sum);
  if (drawn == cumulative.end()) return static_cast<int32_t>(likeliest - logits.begin());
  return static_cast<int32_t>(drawn - cumulative.begin());
}

}  // namespace muster
