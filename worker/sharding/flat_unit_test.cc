#include "worker/sharding/flat_unit.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "common/error.h"

namespace muster {
namespace {

UnitSpec unit() {
  UnitSpec spec;
  spec.name = "blocks.0";
  spec.parameters = {{"a", {5}, Init::kOnes, 0.0, false},
                     {"b", {2, 3}, Init::kNormal, 0.1, true},
                     {"c", {4, 1}, Init::kNormal, 0.1, true},
                     {"d", {2}, Init::kZeros, 0.0, false}};
  return spec;
}

TEST(FlatUnit, ParametersLieInOrderWithoutGaps) {
  const FlatUnit flat(unit(), {.world_size = 3, .rank = 1, .shard_group = 3});
  EXPECT_EQ(flat.numel, 17);
  EXPECT_EQ(flat.shard, 6);
  EXPECT_EQ(flat.padded, 18);
  EXPECT_EQ(flat.begin, 6);
  EXPECT_EQ(flat.owned, (Range{6, 12}));
  const Tensor buffer({flat.padded}, DType::kFloat32);
  const std::vector<TensorView> views = flat.parameters(buffer);
  ASSERT_EQ(views.size(), 4u);
  EXPECT_EQ(views[0].data<float>(), buffer.data<float>());
  EXPECT_EQ(views[1].data<float>(), buffer.data<float>() + 5);
  EXPECT_EQ(views[3].data<float>(), buffer.data<float>() + 15);
  EXPECT_EQ(views[1].shape(), (Shape{2, 3}));
}

TEST(FlatUnit, ShardsOfAGroupAreMadeOfThePartsOfTheWorld) {
  for (int world = 1; world <= 20; ++world) {
    for (int group = 1; group <= world; ++group) {
      if (world % group != 0) continue;
      for (int rank = 0; rank < world; ++rank) {
        const Placement placement{world, rank, group};
        const FlatUnit flat(unit(), placement);
        EXPECT_EQ(flat.padded, shard_size(17, world) * world);
        EXPECT_EQ(flat.shard * group, flat.padded);
        EXPECT_EQ(flat.begin, placement.member() * flat.shard);
        EXPECT_EQ(flat.owned.begin, std::min<int64_t>(flat.begin, 17));
        EXPECT_EQ(flat.owned.end, std::min<int64_t>(flat.begin + flat.shard, 17));
        EXPECT_EQ(flat.saved, owned_range(17, world, placement.part()));
        EXPECT_GE(flat.saved.begin, flat.owned.begin);
        EXPECT_LE(flat.saved.end, flat.owned.end);
      }
    }
  }
}

// Element by element against the parameters' own flags.
TEST(FlatUnit, SegmentsGiveEveryElementItsDecay) {
  const bool decays[] = {false, true, true, false};
  const int64_t ends[] = {5, 11, 15, 17};
  for (int world = 1; world <= 20; ++world) {
    for (int rank = 0; rank < world; ++rank) {
      const FlatUnit flat(unit(), {world, rank, world});
      std::vector<int> seen(flat.owned.size(), 0);
      for (const AdamwSegment& segment : flat.segments(flat.owned, 0.25)) {
        for (int64_t i = segment.begin; i < segment.end; ++i) {
          ++seen.at(i);
          int parameter = 0;
          while (ends[parameter] <= flat.owned.begin + i) ++parameter;
          EXPECT_EQ(segment.weight_decay, decays[parameter] ? 0.25f : 0.0f);
        }
      }
      for (const int count : seen) EXPECT_EQ(count, 1);
    }
  }
  EXPECT_EQ(FlatUnit(unit(), {}).segments({0, 17}, 0.25).size(), 3u) << "neighbours merge";
}

TEST(ShardMode, UnknownModeNamesTheKnownOnes) {
  EXPECT_EQ(parse_shard_mode("optimizer"), ShardMode::kOptimizer);
  try {
    parse_shard_mode("zero3");
    FAIL() << "zero3 was taken";
  } catch (const ConfigError& e) {
    EXPECT_NE(std::string(e.what()).find("zero3"), std::string::npos);
    EXPECT_NE(std::string(e.what()).find("full"), std::string::npos);
  }
}

}  // namespace
}  // namespace muster
