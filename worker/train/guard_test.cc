#include "worker/train/guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "common/error.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

StepControl skipped(SkipReason reason, double loss) {
  StepControl control;
  control.reason = reason;
  control.loss = loss;
  control.loss_mean_before = 2.0;
  return control;
}

TEST(Guard, EveryReasonNamesItsFigures) {
  TrainConfig train;
  train.spike_factor = 3.0;
  EXPECT_EQ(skip_reason(train, {}), "");
  EXPECT_THAT(skip_reason(train, skipped(SkipReason::kLossNotFinite,
                                         std::numeric_limits<double>::infinity())),
              HasSubstr("inf"));
  EXPECT_THAT(skip_reason(train, skipped(SkipReason::kLossSpike, 6.5)),
              ::testing::AllOf(HasSubstr("6.5"), HasSubstr("3"), HasSubstr("2.0")));
  EXPECT_THAT(skip_reason(train, skipped(SkipReason::kGradNormNotFinite, 1.0)), HasSubstr("norm"));
}

TEST(Guard, StopsAfterTooManySkipsInARow) {
  TrainConfig train;
  train.max_skips = 2;
  StepControl control = skipped(SkipReason::kLossNotFinite, std::nan(""));
  control.skips_in_row = 2;
  EXPECT_NO_THROW(check_skips(train, control));
  control.skips_in_row = 3;
  try {
    check_skips(train, control);
    FAIL() << "the third skip in a row must stop";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("the loss is nan"));
  }
}

}  // namespace
}  // namespace muster
