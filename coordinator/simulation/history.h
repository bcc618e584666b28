// What stands for the training state in a simulation: the hash of all steps and samples that went
// into it, in order. A sample that is lost, repeated or trained on out of turn changes it for good.
#pragma once

#include <cstdint>
#include <vector>

#include "common/hash.h"

namespace muster::simulation {

constexpr uint64_t kSeedHistory = 0x5eed;

inline uint64_t hash_of(const std::vector<int64_t>& samples) {
  return xxh3(samples.data(), samples.size() * sizeof(int64_t));
}

// After `step`, whose samples have the hash `samples`.
inline uint64_t next_history(uint64_t before, int64_t step, uint64_t samples) {
  const uint64_t words[] = {before, static_cast<uint64_t>(step), samples};
  return xxh3(words, sizeof words);
}

// The loss that a worker with this state reports: so metrics.jsonl shows the history of every step.
inline double loss_of(uint64_t history) {
  constexpr double kUnit = 0x1.0p-53;
  return static_cast<double>(history >> 11) * kUnit;
}

}  // namespace muster::simulation
