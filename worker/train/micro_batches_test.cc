#include "worker/train/micro_batches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "common/slice.h"

namespace muster {
namespace {

TEST(MicroBatches, EveryWorldSizeCoversEverySampleOnceInOrder) {
  for (int64_t global : {1, 2, 7, 32, 33}) {
    for (int world = 1; world <= global; ++world) {
      for (int64_t micro : {1, 3, 8, 100}) {
        const int64_t passes = pass_count(global, world, micro);
        std::vector<int64_t> seen;
        for (int rank = 0; rank < world; ++rank) {
          const auto [begin, end] = slice_of(global, rank, world);
          std::vector<int64_t> samples(end - begin);
          std::iota(samples.begin(), samples.end(), begin);
          const auto batches = cut(samples, passes);
          ASSERT_EQ(static_cast<int64_t>(batches.size()), passes);
          for (const auto& batch : batches) {
            ASSERT_LE(static_cast<int64_t>(batch.size()), micro);
            seen.insert(seen.end(), batch.begin(), batch.end());
          }
        }
        std::vector<int64_t> expected(global);
        std::iota(expected.begin(), expected.end(), 0);
        EXPECT_EQ(seen, expected) << global << " samples, " << world << " workers, micro-batch "
                                  << micro;
      }
    }
  }
}

TEST(MicroBatches, SlicesDifferByOneAtMost) {
  int64_t smallest = 100;
  int64_t largest = 0;
  for (int rank = 0; rank < 5; ++rank) {
    const auto [begin, end] = slice_of(33, rank, 5);
    smallest = std::min(smallest, end - begin);
    largest = std::max(largest, end - begin);
  }
  EXPECT_EQ(smallest, 6);
  EXPECT_EQ(largest, 7);
}

TEST(MicroBatches, ARankWithTooFewSamplesGetsEmptyPasses) {
  EXPECT_EQ(pass_count(3, 2, 1), 2);
  const auto batches = cut({7}, 2);
  EXPECT_EQ(batches[0], std::vector<int64_t>{7});
  EXPECT_TRUE(batches[1].empty());
}

}  // namespace
}  // namespace muster
