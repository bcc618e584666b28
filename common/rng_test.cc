#include "common/rng.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <set>

namespace muster {
namespace {

// Known answers for philox4x32-10 from Random123's kat_vectors.
TEST(RngTest, PhiloxKnownAnswers) {
  EXPECT_EQ(philox(0, {{0, 0, 0, 0}}),
            (PhiloxBlock{{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}));
  EXPECT_EQ(philox(0xffffffffffffffff, {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}),
            (PhiloxBlock{{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}));
  EXPECT_EQ(philox(0x299f31d0a4093822, {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}),
            (PhiloxBlock{{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}));
}

TEST(RngTest, IsAFunctionOfKeyAndIndex) {
  const CounterRng rng(7, RandomPurpose::kInit, 3);
  const uint64_t late = rng.bits(1000000);
  for (uint64_t i = 0; i < 10; ++i) rng.bits(i);
  EXPECT_EQ(rng.bits(1000000), late);
  EXPECT_EQ(CounterRng(7, RandomPurpose::kInit, 3).bits(1000000), late);
  EXPECT_EQ(CounterRng(7, RandomPurpose::kInit, 4).with_stream(3).bits(1000000), late);
}

TEST(RngTest, SeedsPurposesAndStreamsDiffer) {
  std::set<uint64_t> seen;
  for (const uint64_t seed : {0, 1, 2}) {
    for (const auto purpose : {RandomPurpose::kInit, RandomPurpose::kSampleOrder,
                               RandomPurpose::kDropout, RandomPurpose::kGenerate}) {
      for (const uint64_t stream : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32}) {
        for (const uint64_t i : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32}) {
          seen.insert(CounterRng(seed, purpose, stream).bits(i));
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), 3u * 4 * 3 * 3);
}

// Bounds are five standard errors: the numbers are fixed, so a right generator never fails.
TEST(RngTest, UniformIsUniform) {
  const CounterRng rng(1, RandomPurpose::kDropout, 0);
  constexpr int kCount = 100000, kBins = 20;
  std::array<int, kBins> bins{};
  double sum = 0;
  for (int i = 0; i < kCount; ++i) {
    const double value = rng.uniform(i);
    ASSERT_GE(value, 0.0);
    ASSERT_LT(value, 1.0);
    sum += value;
    ++bins[static_cast<int>(value * kBins)];
  }
  EXPECT_NEAR(sum / kCount, 0.5, 5 * std::sqrt(1.0 / 12 / kCount));
  const double expected = double{kCount} / kBins;
  for (const int count : bins) EXPECT_NEAR(count, expected, 5 * std::sqrt(expected));
}

TEST(RngTest, NormalIsNormal) {
  const CounterRng rng(1, RandomPurpose::kInit, 0);
  constexpr int kCount = 100000;
  double sum = 0, squares = 0, cubes = 0, fourths = 0;
  int beyond_two = 0;
  for (int i = 0; i < kCount; ++i) {
    const double value = rng.normal(i);
    ASSERT_TRUE(std::isfinite(value));
    sum += value;
    squares += value * value;
    cubes += value * value * value;
    fourths += value * value * value * value;
    beyond_two += std::abs(value) > 2 ? 1 : 0;
  }
  const double error = 5 / std::sqrt(double{kCount});
  EXPECT_NEAR(sum / kCount, 0, error);
  EXPECT_NEAR(squares / kCount, 1, error * std::sqrt(2.0));
  EXPECT_NEAR(cubes / kCount, 0, error * std::sqrt(15.0));
  EXPECT_NEAR(fourths / kCount, 3, error * std::sqrt(96.0));
  EXPECT_NEAR(beyond_two / double{kCount}, 0.0455003, error * std::sqrt(0.0455));
}

}  // namespace
}  // namespace muster
