#include "worker/train/guard.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "common/error.h"

namespace muster {
namespace {

TEST(Guard, LetsAFiniteLossPass) {
  EXPECT_TRUE(judge_loss({}, {}, 5.5).apply);
}

TEST(Guard, RefusesNanAndInfinity) {
  EXPECT_FALSE(judge_loss({}, {}, std::nan("")).apply);
  const auto decision = judge_loss({}, {}, std::numeric_limits<double>::infinity());
  EXPECT_FALSE(decision.apply);
  EXPECT_NE(decision.reason.find("inf"), std::string::npos);
}

TEST(Guard, RefusesASpikeOnlyWhenAsked) {
  TrainingProgress progress;
  progress.updates = 10;
  progress.loss_mean = 2.0;
  TrainConfig train;
  EXPECT_TRUE(judge_loss(train, progress, 7.0).apply);
  train.spike_factor = 3.0;
  EXPECT_TRUE(judge_loss(train, progress, 5.9).apply);
  EXPECT_FALSE(judge_loss(train, progress, 6.1).apply);
  EXPECT_TRUE(judge_loss(train, {}, 1000.0).apply) << "no mean yet";
}

TEST(Guard, StopsAfterTooManySkipsInARow) {
  TrainConfig train;
  train.max_skips = 2;
  TrainingProgress progress;
  progress = advance(train, progress, 2.0, 100, false, "x");
  progress = advance(train, progress, 2.0, 100, false, "x");
  const auto recovered = advance(train, progress, 2.0, 100, true, "");
  EXPECT_EQ(recovered.skips_in_row, 0);
  EXPECT_EQ(recovered.updates, 1);
  EXPECT_EQ(recovered.tokens, 300);
  try {
    advance(train, progress, 2.0, 100, false, "the loss is nan");
    FAIL() << "the third skip in a row must stop";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("the loss is nan"), std::string::npos);
  }
}

TEST(Guard, TheMeanFollowsAppliedLossesOnly) {
  TrainConfig train;
  auto progress = advance(train, {}, 4.0, 1, true, "");
  EXPECT_DOUBLE_EQ(progress.loss_mean, 4.0);
  progress = advance(train, progress, 100.0, 1, false, "spike");
  EXPECT_DOUBLE_EQ(progress.loss_mean, 4.0);
  progress = advance(train, progress, 3.0, 1, true, "");
  EXPECT_LT(progress.loss_mean, 4.0);
}

}  // namespace
}  // namespace muster
