#include "worker/generate/sampler.h"

#include <gtest/gtest.h>

#include <cmath>

namespace muster {
namespace {

const std::vector<float> kLogits = {1.0f, 3.0f, -2.0f, 2.5f, 3.0f};

std::vector<double> shares(const SamplingOptions& options, int draws) {
  const CounterRng rng(7, RandomPurpose::kGenerate, 0);
  std::vector<double> share(kLogits.size());
  for (int i = 0; i < draws; ++i) share[sample_token(kLogits, options, rng, i)] += 1.0 / draws;
  return share;
}

TEST(SampleToken, FollowsTheSoftmaxAtATemperature) {
  constexpr int kDraws = 20000;
  for (const double temperature : {0.5, 1.0, 2.0}) {
    const std::vector<double> share = shares({temperature, 0}, kDraws);
    double sum = 0;
    for (const float z : kLogits) sum += std::exp(z / temperature);
    for (size_t i = 0; i < kLogits.size(); ++i) {
      const double p = std::exp(kLogits[i] / temperature) / sum;
      EXPECT_NEAR(share[i], p, 5 * std::sqrt(p * (1 - p) / kDraws)) << i;
    }
  }
}

TEST(SampleToken, ZeroTemperatureTakesTheFirstOfTheLikeliest) {
  const CounterRng rng(7, RandomPurpose::kGenerate, 0);
  for (uint64_t draw = 0; draw < 20; ++draw) {
    EXPECT_EQ(sample_token(kLogits, {.temperature = 0.0}, rng, draw), 1);
  }
}

TEST(SampleToken, TopKLeavesTheOthersOut) {
  const std::vector<double> two = shares({1.0, 2}, 1000);
  EXPECT_EQ(two[0] + two[2] + two[3], 0.0);
  EXPECT_GT(two[1], 0.4);
  EXPECT_GT(two[4], 0.4);
  const std::vector<double> three = shares({1.0, 3}, 1000);
  EXPECT_EQ(three[0] + three[2], 0.0);
  EXPECT_GT(three[3], 0.1);
  EXPECT_GT(shares({1.0, 99}, 1000)[0], 0.0);
}

TEST(SampleToken, IsAFunctionOfSeedAndDraw) {
  int differ = 0;
  for (uint64_t draw = 0; draw < 50; ++draw) {
    const CounterRng one(7, RandomPurpose::kGenerate, 0);
    const CounterRng same(7, RandomPurpose::kGenerate, 0);
    const CounterRng other(8, RandomPurpose::kGenerate, 0);
    const int32_t token = sample_token(kLogits, {}, one, draw);
    EXPECT_EQ(sample_token(kLogits, {}, same, draw), token);
    differ += sample_token(kLogits, {}, other, draw) != token ? 1 : 0;
  }
  EXPECT_GT(differ, 0);
}

}  // namespace
}  // namespace muster
