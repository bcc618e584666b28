#include "coordinator/sample_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

namespace muster {
namespace {

TEST(PermutationTest, IsABijection) {
  for (int64_t size : {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 64, 65, 100, 255, 257, 1000, 4097}) {
    for (uint64_t key : {0ULL, 1ULL, 0xdeadbeefcafef00dULL}) {
      const Permutation permutation(key, size);
      std::vector<bool> seen(static_cast<size_t>(size));
      for (int64_t i = 0; i < size; ++i) {
        const int64_t image = permutation(i);
        ASSERT_GE(image, 0);
        ASSERT_LT(image, size);
        ASSERT_FALSE(seen[static_cast<size_t>(image)]) << size << " maps twice to " << image;
        seen[static_cast<size_t>(image)] = true;
      }
    }
  }
}

TEST(PermutationTest, WorksFarBeyondMemory) {
  const int64_t size = (int64_t{1} << 45) + 12345;
  const Permutation permutation(7, size);
  std::set<int64_t> images;
  for (int64_t i = size - 1000; i < size; ++i) {
    const int64_t image = permutation(i);
    EXPECT_TRUE(image >= 0 && image < size);
    images.insert(image);
  }
  EXPECT_EQ(images.size(), 1000u);
}

// Each element should land in each tenth of the range about equally often over many keys.
TEST(PermutationTest, SpreadsEvenly) {
  constexpr int64_t kSize = 50;
  constexpr int kKeys = 4000;
  std::vector<std::vector<int>> hits(kSize, std::vector<int>(10));
  for (uint64_t key = 0; key < kKeys; ++key) {
    const Permutation permutation(key, kSize);
    for (int64_t i = 0; i < kSize; ++i) ++hits[i][permutation(i) / 5];
  }
  // Binomial: mean 400, standard deviation 19; five of these leave one failure in a million cells.
  for (const auto& row : hits) {
    for (int count : row) EXPECT_NEAR(count, kKeys / 10, 5 * 19);
  }
}

TEST(SampleOrderTest, EachEpochHoldsEachSampleOnce) {
  constexpr int64_t kSamples = 103;
  const SampleOrder order(5, "abc", kSamples, true);
  std::vector<int64_t> first;
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < kSamples; ++i) ids.push_back(order.at(epoch * kSamples + i));
    if (epoch == 0) {
      first = ids;
    } else {
      EXPECT_NE(ids, first) << "epochs should differ";
    }
    std::sort(ids.begin(), ids.end());
    std::vector<int64_t> all(kSamples);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(ids, all);
  }
}

TEST(SampleOrderTest, AStepIsTheSameForEveryWorldSize) {
  const SampleOrder order(1, "f", 37, true);
  constexpr int64_t kBatch = 10;
  for (int64_t step : {1, 2, 3, 4, 5, 40}) {
    const auto alone = order.step_samples(step, kBatch, 0, 1);
    ASSERT_EQ(alone.size(), size_t{kBatch});
    for (int world = 2; world <= kBatch; ++world) {
      std::vector<int64_t> together;
      for (int rank = 0; rank < world; ++rank) {
        const auto mine = order.step_samples(step, kBatch, rank, world);
        EXPECT_GE(static_cast<int64_t>(mine.size()), kBatch / world);
        EXPECT_LE(static_cast<int64_t>(mine.size()), kBatch / world + 1);
        together.insert(together.end(), mine.begin(), mine.end());
      }
      EXPECT_EQ(together, alone) << "step " << step << " world " << world;
    }
  }
}

TEST(SampleOrderTest, StepsFollowEachOtherThroughTheEpochs) {
  const SampleOrder order(1, "f", 7, true);
  std::vector<int64_t> positions;
  for (int64_t step = 1; step <= 5; ++step) {
    const auto samples = order.step_samples(step, 3, 0, 1);
    positions.insert(positions.end(), samples.begin(), samples.end());
  }
  for (int64_t i = 0; i < 15; ++i) EXPECT_EQ(positions[static_cast<size_t>(i)], order.at(i));
}

TEST(SampleOrderTest, DependsOnSeedAndDatasetOnly) {
  const auto ids = [](const SampleOrder& order) { return order.step_samples(1, 64, 0, 1); };
  const auto base = ids(SampleOrder(1, "a", 1000, true));
  EXPECT_EQ(base, ids(SampleOrder(1, "a", 1000, true)));
  EXPECT_NE(base, ids(SampleOrder(2, "a", 1000, true)));
  EXPECT_NE(base, ids(SampleOrder(1, "b", 1000, true)));
}

// Another order would silently change every run that is resumed: pinned.
TEST(SampleOrderTest, IsPinned) {
  const SampleOrder order(1, "0123456789abcdef", 1000, true);
  EXPECT_EQ(order.step_samples(1, 8, 0, 1),
            (std::vector<int64_t>{677, 537, 49, 717, 213, 202, 413, 278}));
}

TEST(SampleOrderTest, WithoutShuffleIsTheIdentity) {
  const SampleOrder order(1, "a", 5, false);
  EXPECT_EQ(order.step_samples(2, 4, 0, 1), (std::vector<int64_t>{4, 0, 1, 2}));
}

}  // namespace
}  // namespace muster
