// Property tests of the whole coordinator: a real Session in simulated clusters with random joins,
// leaves, crashes, silences, slow and repeated messages.
//
// MUSTER_SIMULATION_SEEDS=FIRST:COUNT runs others than the usual ones; the seed that a failure
// names, alone, with FIRST:1.
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <string>

#include "coordinator/simulation/chaos.h"

namespace muster::simulation {
namespace {

struct Seeds {
  uint64_t first = 1;
  uint64_t count = 300;
};

Seeds seeds() {
  const char* text = std::getenv("MUSTER_SIMULATION_SEEDS");
  if (text == nullptr) return {};
  char* end = nullptr;
  Seeds chosen;
  chosen.first = std::strtoull(text, &end, 10);
  chosen.count = *end == ':' ? std::strtoull(end + 1, nullptr, 10) : 1;
  return chosen;
}

TEST(SimulationTest, EverySampleIsInOneCommittedStepWhateverHappens) {
  const auto level = spdlog::get_level();
  spdlog::set_level(spdlog::level::off);
  const auto [first, count] = seeds();
  ChaosOutcome sum;
  int failures = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const ChaosOutcome outcome = run_chaos(seed, count == 1 ? 3000 : 60);
    sum.steps += outcome.steps;
    sum.generations += outcome.generations;
    sum.faults += outcome.faults;
    sum.simulated_s += outcome.simulated_s;
    if (outcome.violation.empty()) continue;
    ADD_FAILURE() << "seed " << seed << ": " << outcome.violation;
    constexpr int kMostFailures = 3;
    if (++failures >= kMostFailures) break;
  }
  spdlog::set_level(level);
  RecordProperty("faults", std::to_string(sum.faults));
  RecordProperty("generations", std::to_string(sum.generations));
  RecordProperty("steps", std::to_string(sum.steps));
  RecordProperty("simulated_s", std::to_string(sum.simulated_s));
}

}  // namespace
}  // namespace muster::simulation
