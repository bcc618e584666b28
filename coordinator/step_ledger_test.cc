#include "coordinator/step_ledger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster {
namespace {

using testing::ElementsAre;

proto::StepReport report(int rank, int64_t step, uint64_t generation = 1) {
  proto::StepReport report;
  report.set_generation(generation);
  report.set_rank(rank);
  report.set_step(step);
  report.set_tokens(64);
  report.set_loss(static_cast<double>(step));
  report.set_step_s(0.1 * (rank + 1));
  report.set_model_flop(3e12);
  report.set_peak_flops(2e13);
  report.add_samples(10 * step + rank);
  report.add_sample_hashes(7);
  return report;
}

TEST(StepLedgerTest, AStepIsCompleteWhenAllRanksHaveReported) {
  StepLedger ledger(1, 2, 5);
  ledger.expect(6, false);
  ledger.expect(7, false);
  EXPECT_FALSE(ledger.take());
  ledger.add(report(1, 6));
  ledger.add(report(1, 7));
  EXPECT_FALSE(ledger.take());
  EXPECT_THAT(ledger.missing(), ElementsAre(0));
  ledger.add(report(0, 6));
  const auto step = ledger.take();
  ASSERT_TRUE(step);
  EXPECT_EQ(step->metrics.step, 6);
  EXPECT_EQ(step->metrics.tokens, 64) << "a sum over all ranks already";
  EXPECT_EQ(step->metrics.world, 2);
  EXPECT_DOUBLE_EQ(step->metrics.step_s, 0.2) << "the slowest rank's";
  EXPECT_DOUBLE_EQ(step->metrics.mfu, 3e12 / 0.2 / 4e13) << "over both ranks' peaks";
  EXPECT_THAT(step->samples, ElementsAre(TrainedSample{60, 7}, TrainedSample{61, 7}));
  EXPECT_FALSE(ledger.take()) << "each step comes out once";
  ledger.add(report(0, 7));
  EXPECT_EQ(ledger.take()->metrics.step, 7);
}

TEST(StepLedgerTest, MirrorsAreReadyOnceEveryRankSaysSo) {
  StepLedger ledger(1, 2, 0);
  const auto add = [&](int rank, int64_t step, bool ready) {
    proto::StepReport one = report(rank, step);
    one.set_mirror_ready(ready);
    ledger.add(one);
  };
  for (int64_t step = 1; step <= 3; ++step) ledger.expect(step, false);
  add(0, 1, true);
  add(1, 1, false);
  EXPECT_FALSE(ledger.take()->mirrors_ready);
  add(0, 2, true);
  add(1, 2, true);
  EXPECT_TRUE(ledger.take()->mirrors_ready);
  add(1, 3, true);
  EXPECT_FALSE(ledger.take_incomplete()->mirrors_ready) << "nobody knows of the other one";
}

TEST(StepLedgerTest, WhatIsMirroredIsWhatEveryRankHas) {
  StepLedger ledger(1, 2, 0);
  for (int64_t step = 1; step <= 3; ++step) ledger.expect(step, false);
  proto::StepReport one = report(0, 1);
  one.set_mirror_ready(true);
  one.set_mirrored(0);
  one.set_mirror_sent_s(2.0);
  ledger.add(one);
  one = report(1, 1);
  one.set_mirror_ready(true);
  ledger.add(one);
  const auto first = ledger.take();
  EXPECT_FALSE(first->mirrored) << "rank 1 has nothing";
  EXPECT_EQ(first->mirror_sent_s, 2.0);
  for (int rank = 0; rank < 2; ++rank) {
    one = report(rank, 2);
    one.set_mirror_ready(true);
    one.set_mirrored(rank);
    ledger.add(one);
  }
  EXPECT_EQ(ledger.take()->mirrored, 0);
  one.set_step(3);
  ledger.add(one);
  EXPECT_FALSE(ledger.take_incomplete()->mirrored);
}

TEST(StepLedgerTest, StepsComeOutInOrder) {
  StepLedger ledger(1, 1, 0);
  ledger.expect(1, false);
  ledger.expect(2, false);
  ledger.add(report(0, 2));
  EXPECT_FALSE(ledger.take());
  ledger.add(report(0, 1));
  EXPECT_EQ(ledger.take()->metrics.step, 1);
  EXPECT_EQ(ledger.take()->metrics.step, 2);
}

TEST(StepLedgerTest, AnEvaluatedStepWaitsForItsHeldOutLoss) {
  StepLedger ledger(1, 1, 0);
  ledger.expect(1, true);
  ledger.add(report(0, 1));
  EXPECT_FALSE(ledger.take());
  proto::EvalReport eval;
  eval.set_generation(1);
  eval.set_step(1);
  eval.set_loss(3.25);
  ledger.add(eval);
  const auto step = ledger.take();
  ASSERT_TRUE(step && step->metrics.has_held_out);
  EXPECT_EQ(step->metrics.held_out_loss, 3.25);
}

TEST(StepLedgerTest, WhatDoesNotBelongIsIgnored) {
  StepLedger ledger(2, 1, 0);
  ledger.expect(1, false);
  ledger.add(report(0, 1, 1));  // an earlier generation
  ledger.add(report(1, 1, 2));  // no such rank
  ledger.add(report(-1, 1, 2));
  ledger.add(report(0, 99, 2));  // never handed out
  EXPECT_FALSE(ledger.take());
  proto::StepReport uneven = report(0, 1, 2);
  uneven.clear_sample_hashes();
  ledger.add(uneven);
  const auto step = ledger.take();
  ASSERT_TRUE(step);
  EXPECT_TRUE(step->samples.empty());
}

}  // namespace
}  // namespace muster
