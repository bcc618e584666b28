#include "coordinator/recovery.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster {
namespace {

using testing::ElementsAre;

TEST(RecoveryTest, TheNewestWholeStateIsChosen) {
  // b died; a mirrors it, but had not received step 8 in full.
  const std::vector<HeldPiece> pieces = {
      {"a", 3, 2, 0, 7}, {"a", 3, 2, 0, 8}, {"a", 3, 2, 1, 7}, {"c", 0, 0, 0, 9}};
  const auto recovery = choose_recovery(pieces);
  ASSERT_TRUE(recovery);
  EXPECT_EQ(recovery->generation, 3u);
  EXPECT_EQ(recovery->step, 7);
  EXPECT_THAT(recovery->holders, ElementsAre("a", "a"));
}

TEST(RecoveryTest, AnOlderGenerationServesWhileTheNewOneHasNoMirrors) {
  const std::vector<HeldPiece> pieces = {
      {"a", 3, 2, 0, 7}, {"b", 3, 2, 1, 7}, {"a", 4, 3, 0, 8}, {"b", 4, 3, 1, 8}};
  const auto recovery = choose_recovery(pieces);
  ASSERT_TRUE(recovery);
  EXPECT_EQ(recovery->generation, 3u);
  EXPECT_EQ(recovery->step, 7);
  EXPECT_THAT(recovery->holders, ElementsAre("a", "b"));
}

TEST(RecoveryTest, GivingIsSpread) {
  const std::vector<HeldPiece> pieces = {{"a", 1, 3, 0, 5}, {"a", 1, 3, 2, 5}, {"b", 1, 3, 1, 5},
                                         {"b", 1, 3, 0, 5}, {"c", 1, 3, 2, 5}, {"c", 1, 3, 1, 5}};
  EXPECT_THAT(choose_recovery(pieces)->holders, ElementsAre("a", "b", "c"));
}

TEST(RecoveryTest, AWorkerLostWithItsMirrorIsLost) {
  EXPECT_FALSE(choose_recovery({{"a", 1, 3, 0, 5}, {"a", 1, 3, 2, 5}}));
  EXPECT_FALSE(choose_recovery({}));
  EXPECT_FALSE(choose_recovery({{"a", 1, 0, 0, 5}, {"a", 1, 1, 1, 5}, {"a", 1, 1, -1, 5}}));
}

}  // namespace
}  // namespace muster
