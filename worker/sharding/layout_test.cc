// Properties over every world size up to 9 and sizes around the multiples of each.
#include "worker/sharding/layout.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

const int64_t kSizes[] = {0, 1, 2, 3, 5, 8, 9, 10, 11, 17, 100, 101, 5040, 5041};

TEST(Layout, RangesCoverTheUnitOnceInRankOrder) {
  for (const int64_t numel : kSizes) {
    for (int world = 1; world <= 9; ++world) {
      const int64_t n = shard_size(numel, world);
      EXPECT_GE(n * world, numel);
      EXPECT_LT(n * world - numel, world) << "more padding than one element a rank";
      int64_t covered = 0;
      for (int rank = 0; rank < world; ++rank) {
        const Range range = owned_range(numel, world, rank);
        EXPECT_EQ(range.begin, covered);
        EXPECT_LE(range.size(), n);
        EXPECT_EQ(range.begin, std::min(rank * n, numel));
        covered = range.end;
      }
      EXPECT_EQ(covered, numel);
    }
  }
}

TEST(Layout, EveryRankOfEveryPlacementHasItsPartInsideItsShard) {
  for (int world = 1; world <= 12; ++world) {
    for (int group = 1; group <= world; ++group) {
      if (world % group != 0) continue;
      std::vector<int> parts(world, 0);
      for (int rank = 0; rank < world; ++rank) {
        const Placement placement{world, rank, group};
        const int part = placement.part();
        ++parts.at(part);
        EXPECT_EQ(part / placement.replicas(), placement.member());
        EXPECT_EQ(part % placement.replicas(), placement.replica());
        if (group == 1 || group == world) {
          EXPECT_EQ(part, rank);
        }
      }
      EXPECT_EQ(parts, std::vector<int>(world, 1));
    }
  }
}

TEST(Layout, ARankMayOwnNothing) {
  EXPECT_EQ(shard_size(4, 3), 2);
  EXPECT_EQ(owned_range(4, 3, 1), (Range{2, 4}));
  EXPECT_EQ(owned_range(4, 3, 2), (Range{4, 4}));
  EXPECT_EQ(owned_range(0, 2, 1), (Range{0, 0}));
}

TEST(Layout, TransfersMoveEveryElementOnceBetweenItsOwners) {
  for (const int64_t numel : kSizes) {
    for (int from = 1; from <= 9; ++from) {
      for (int to = 1; to <= 9; ++to) {
        int64_t at = 0;
        for (const Transfer& transfer : plan_transfers(numel, from, to)) {
          EXPECT_EQ(transfer.range.begin, at);
          EXPECT_GT(transfer.range.size(), 0);
          const Range old_range = owned_range(numel, from, transfer.from_rank);
          const Range new_range = owned_range(numel, to, transfer.to_rank);
          EXPECT_LE(std::max(old_range.begin, new_range.begin), transfer.range.begin);
          EXPECT_GE(std::min(old_range.end, new_range.end), transfer.range.end);
          at = transfer.range.end;
        }
        EXPECT_EQ(at, numel);
      }
    }
  }
}

TEST(Layout, EqualWorldsKeepEveryShardWhole) {
  const std::vector<Transfer> plan = plan_transfers(100, 3, 3);
  ASSERT_EQ(plan.size(), 3u);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(plan[rank].from_rank, rank);
    EXPECT_EQ(plan[rank].to_rank, rank);
    EXPECT_EQ(plan[rank].range, owned_range(100, 3, rank));
  }
}

}  // namespace
}  // namespace muster
