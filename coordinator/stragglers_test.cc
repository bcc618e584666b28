#include "coordinator/stragglers.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

// Steps `first` to `last` of three workers; c computes for `slow` seconds, the others for 1 and
// wait for it.
std::vector<Straggler> run(Stragglers* stragglers, int64_t first, int64_t last, double slow) {
  std::vector<Straggler> named;
  for (int64_t step = first; step <= last; ++step) {
    for (const char* id : {"a", "b"}) stragglers->add(id, step, {slow, slow - 1.0});
    for (const Straggler& one : stragglers->add("c", step, {slow, 0.0})) named.push_back(one);
  }
  return named;
}

TEST(StragglersTest, OneThatIsSlowForLongIsNamedOnce) {
  Stragglers stragglers({.factor = 1.5, .steps = 5});
  stragglers.begin(3);
  EXPECT_TRUE(run(&stragglers, 1, 4, 2.0).empty());
  const auto named = run(&stragglers, 5, 20, 2.0);
  ASSERT_EQ(named.size(), 1u);
  EXPECT_EQ(named[0].member_id, "c");
  EXPECT_DOUBLE_EQ(named[0].own_s, 2.0);
  EXPECT_DOUBLE_EQ(named[0].median_s, 1.0) << "waiting for c is not the others' slowness";
  EXPECT_TRUE(stragglers.is_slow("c"));
  EXPECT_FALSE(stragglers.is_slow("a"));
  EXPECT_DOUBLE_EQ(stragglers.last("a").wait_s, 1.0);
  run(&stragglers, 21, 21, 1.0);
  EXPECT_FALSE(stragglers.is_slow("c")) << "it has recovered";
}

TEST(StragglersTest, AFewSlowStepsAreNoReason) {
  Stragglers stragglers({.factor = 1.5, .steps = 5});
  stragglers.begin(3);
  for (int64_t step = 1; step < 40; step += 5) {
    EXPECT_TRUE(run(&stragglers, step, step + 3, 2.0).empty());
    EXPECT_TRUE(run(&stragglers, step + 4, step + 4, 1.0).empty());
  }
}

TEST(StragglersTest, OfTwoTheSlowerOneAndOfOneNobody) {
  Stragglers stragglers({.factor = 1.5, .steps = 2});
  stragglers.begin(2);
  for (int64_t step = 1; step <= 2; ++step) {
    EXPECT_TRUE(stragglers.add("a", step, {3.0, 2.0}).empty());
    EXPECT_EQ(stragglers.add("b", step, {3.0, 0.0}).size(), step == 2 ? 1u : 0u);
  }
  stragglers.begin(1);
  for (int64_t step = 1; step <= 9; ++step) {
    EXPECT_TRUE(stragglers.add("a", step, {3.0, 0.0}).empty());
  }
}

TEST(StragglersTest, ZeroTurnsItOff) {
  Stragglers stragglers({.factor = 0.0, .steps = 1});
  stragglers.begin(3);
  EXPECT_TRUE(run(&stragglers, 1, 9, 100.0).empty());
}

}  // namespace
}  // namespace muster
