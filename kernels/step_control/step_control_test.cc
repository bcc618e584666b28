#include "kernels/step_control/step_control.h"

#include "kernels/testing.h"

namespace muster {
namespace {

using namespace testing;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

StepControl decided(StepControl control, double squares, double loss_sum, double tokens,
                    const StepRules& rules = {}) {
  double sums[3] = {squares, loss_sum, tokens};
  alignas(16) StepControl state = control;
  decide_step(Stream::cpu(), TensorView(&state, DType::kUInt8, {sizeof(StepControl)}),
              ConstTensorView(sums, DType::kFloat64, {3}), rules);
  return state;
}

TEST(StepControlTest, FirstStepSetsMeanAndFactors) {
  const StepRules rules{.lr = 0.01, .beta1 = 0.9, .beta2 = 0.99};
  const StepControl c = decided({}, 9.0 * 64, 2.5 * 8, 8, rules);
  EXPECT_EQ(c.apply, 1);
  EXPECT_EQ(c.reason, SkipReason::kNone);
  EXPECT_EQ(c.updates, 1);
  EXPECT_EQ(c.tokens, 8);
  EXPECT_EQ(c.step_tokens, 8.0);
  EXPECT_EQ(c.loss, 2.5);
  EXPECT_EQ(c.loss_mean_before, 0.0);
  EXPECT_EQ(c.loss_mean, 2.5);
  EXPECT_EQ(c.grad_norm, 3.0);
  EXPECT_EQ(c.grad_scale, 1.0f / 8);
  EXPECT_FLOAT_EQ(c.step_size, 0.1f);
  EXPECT_FLOAT_EQ(c.inverse_root_correction, 10.0f);
}

// Against the formulas as they stand in the papers, over the life of a run.
TEST(StepControlTest, BiasCorrectionsFollowTheUpdates) {
  const StepRules rules{.lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95};
  for (const int64_t updates : {1, 2, 3, 10, 100, 1000, 123456}) {
    const StepControl c = decided({.updates = updates - 1, .loss_mean = 1.0}, 1.0, 1.0, 1.0, rules);
    EXPECT_EQ(c.updates, updates);
    const auto n = static_cast<double>(updates);
    EXPECT_FLOAT_EQ(c.step_size, static_cast<float>(3e-4 / (1 - std::pow(0.9, n))));
    EXPECT_FLOAT_EQ(c.inverse_root_correction,
                    static_cast<float>(1 / std::sqrt(1 - std::pow(0.95, n))));
  }
}

TEST(StepControlTest, MeanMovesByItsDecay) {
  const StepControl before{.updates = 5, .tokens = 100, .loss_mean = 2.0, .skips_in_row = 3};
  const StepControl c = decided(before, 1.0, 3.0 * 4, 4);
  EXPECT_EQ(c.loss_mean_before, 2.0);
  EXPECT_DOUBLE_EQ(c.loss_mean, (1 - kLossMeanDecay) * 2.0 + kLossMeanDecay * 3.0);
  EXPECT_EQ(c.skips_in_row, 0);
  EXPECT_EQ(c.tokens, 104);
}

TEST(StepControlTest, ClipsOnlyNormsAboveTheLimit) {
  // The gradients' norm is 6 over 2 tokens.
  EXPECT_EQ(decided({}, 36.0, 1.0, 2, {.clip_norm = 0.0}).grad_scale, 0.5f);
  EXPECT_EQ(decided({}, 36.0, 1.0, 2, {.clip_norm = 3.0}).grad_scale, 0.5f);
  const StepControl c = decided({}, 36.0, 1.0, 2, {.clip_norm = 0.75});
  EXPECT_EQ(c.grad_scale, 0.125f);
  EXPECT_EQ(c.grad_norm, 3.0);
}

void expect_skipped(const StepControl& before, const StepControl& c, SkipReason reason,
                    int64_t tokens) {
  EXPECT_EQ(c.apply, 0);
  EXPECT_EQ(c.reason, reason);
  EXPECT_EQ(c.updates, before.updates);
  EXPECT_EQ(c.loss_mean, before.loss_mean);
  EXPECT_EQ(c.loss_mean_before, before.loss_mean);
  EXPECT_EQ(c.skips_in_row, before.skips_in_row + 1);
  EXPECT_EQ(c.tokens, before.tokens + tokens);
}

TEST(StepControlTest, SkipsWhatIsNotFinite) {
  const StepControl before{.updates = 2, .tokens = 10, .loss_mean = 1.5, .skips_in_row = 1};
  expect_skipped(before, decided(before, 1.0, kPoison, 4), SkipReason::kLossNotFinite, 4);
  expect_skipped(before, decided(before, kPoison, kInfinity, 4), SkipReason::kLossNotFinite, 4);
  expect_skipped(before, decided(before, kPoison, 1.0, 4), SkipReason::kGradNormNotFinite, 4);
  expect_skipped(before, decided(before, kInfinity, 1.0, 4), SkipReason::kGradNormNotFinite, 4);
  // No target token at all: 0 / 0.
  expect_skipped(before, decided(before, 0.0, 0.0, 0), SkipReason::kLossNotFinite, 0);
}

TEST(StepControlTest, SkipsSpikesOnceThereIsAMean) {
  const StepRules rules{.spike_factor = 2.0};
  const StepControl before{.updates = 1, .tokens = 10, .loss_mean = 1.5};
  expect_skipped(before, decided(before, 1.0, 3.25 * 4, 4, rules), SkipReason::kLossSpike, 4);
  // A spike's gradients may be anything: the first reason counts.
  expect_skipped(before, decided(before, kPoison, 3.25 * 4, 4, rules), SkipReason::kLossSpike, 4);
  EXPECT_EQ(decided(before, 1.0, 3.0 * 4, 4, rules).apply, 1);           // at the limit
  EXPECT_EQ(decided(before, 1.0, 30.0 * 4, 4, StepRules{}).apply, 1);    // off
  EXPECT_EQ(decided({.tokens = 10}, 1.0, 3.25 * 4, 4, rules).apply, 1);  // no mean yet
}

TEST(StepControlDeathTest, RefusesAnotherSize) {
  double sums[3] = {};
  alignas(16) StepControl state;
  EXPECT_DEATH(
      decide_step(Stream::cpu(), TensorView(&state, DType::kUInt8, {sizeof(StepControl) - 1}),
                  ConstTensorView(sums, DType::kFloat64, {3}), {}),
      "87");
}

}  // namespace
}  // namespace muster
