#include "worker/train/schedule.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

ScheduleConfig make(const std::string& type, int64_t warmup, int64_t decay = 0) {
  ScheduleConfig schedule;
  schedule.type = type;
  schedule.warmup_steps = warmup;
  schedule.decay_steps = decay;
  schedule.min_lr_ratio = 0.1;
  return schedule;
}

TEST(LearningRate, WarmsUpLinearlyFromTheFirstStep) {
  for (const char* type : {"cosine", "wsd", "linear", "constant"}) {
    const auto schedule = make(type, 10);
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 2.0, 1, 100), 0.2) << type;
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 2.0, 5, 100), 1.0) << type;
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 2.0, 10, 100), 2.0) << type;
  }
}

TEST(LearningRate, EndsAtItsFloor) {
  for (const char* type : {"cosine", "wsd", "linear"}) {
    EXPECT_NEAR(learning_rate(make(type, 10), 2.0, 100, 100), 0.2, 1e-12) << type;
  }
  EXPECT_DOUBLE_EQ(learning_rate(make("constant", 10), 2.0, 100, 100), 2.0);
}

TEST(LearningRate, IsHalfwayInTheMiddleOfADecay) {
  EXPECT_NEAR(learning_rate(make("cosine", 0), 2.0, 50, 100), 1.1, 1e-12);
  EXPECT_NEAR(learning_rate(make("linear", 0), 2.0, 50, 100), 1.1, 1e-12);
}

TEST(LearningRate, WsdStaysUpUntilItsDecay) {
  const auto schedule = make("wsd", 10, 20);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 2.0, 80, 100), 2.0);
  EXPECT_NEAR(learning_rate(schedule, 2.0, 90, 100), 1.1, 1e-12);
  EXPECT_DOUBLE_EQ(learning_rate(make("wsd", 10), 2.0, 90, 100), 2.0);
  EXPECT_LT(learning_rate(make("wsd", 10), 2.0, 91, 100), 2.0);
}

TEST(LearningRate, SurvivesAWarmUpLongerThanTheRun) {
  EXPECT_DOUBLE_EQ(learning_rate(make("cosine", 500), 2.0, 50, 100), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(make("cosine", 500), 2.0, 100, 100), 2.0);
}

TEST(LearningRate, NeverRisesAfterWarmUp) {
  for (const char* type : {"cosine", "wsd", "linear", "constant"}) {
    double last = 2.0;
    for (int64_t step = 10; step <= 100; ++step) {
      const double rate = learning_rate(make(type, 10), 2.0, step, 100);
      EXPECT_LE(rate, last) << type << " at " << step;
      last = rate;
    }
  }
}

}  // namespace
}  // namespace muster
