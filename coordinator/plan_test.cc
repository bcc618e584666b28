#include "coordinator/plan.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(PlanTest, EveryKthStepIsEvaluatedAndSaved) {
  const PlanOptions options{
      .total_steps = 10, .eval_every = 3, .save_every = 4, .has_held_out = true};
  for (int64_t step = 1; step < 10; ++step) {
    const StepFlags flags = step_flags(step, options, false);
    EXPECT_EQ(flags.evaluate, step % 3 == 0) << step;
    EXPECT_EQ(flags.save, step % 4 == 0) << step;
    EXPECT_FALSE(flags.last) << step;
  }
}

TEST(PlanTest, TheEndIsEvaluatedSavedAndLast) {
  const PlanOptions options{
      .total_steps = 10, .eval_every = 3, .save_every = 0, .has_held_out = true};
  const StepFlags flags = step_flags(10, options, false);
  EXPECT_TRUE(flags.evaluate && flags.save && flags.last);
  EXPECT_FALSE(step_flags(9, options, false).save) << "save_every 0 saves at the end only";
}

TEST(PlanTest, WhoWasAskedToLeaveSavesAndLeaves) {
  const PlanOptions options{
      .total_steps = 10, .eval_every = 3, .save_every = 0, .has_held_out = true};
  const StepFlags flags = step_flags(5, options, true);
  EXPECT_TRUE(flags.save && flags.last);
  EXPECT_FALSE(flags.evaluate);
}

TEST(PlanTest, NothingIsEvaluatedWithoutHeldOutSamplesOrOnZero) {
  EXPECT_FALSE(
      step_flags(10, {.total_steps = 10, .eval_every = 5, .has_held_out = false}, false).evaluate);
  EXPECT_FALSE(
      step_flags(10, {.total_steps = 10, .eval_every = 0, .has_held_out = true}, false).evaluate);
}

TEST(PlanTest, LongStepsArePlannedLessFarAhead) {
  EXPECT_EQ(planning_window(0), 4);
  EXPECT_EQ(planning_window(0.1), 4);
  EXPECT_EQ(planning_window(30), 2);
}

}  // namespace
}  // namespace muster
