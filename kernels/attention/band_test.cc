#include "kernels/attention/band.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace muster {
namespace {

bool sees(const Band& band, int64_t i, int64_t j) {
  const int64_t position = i + band.k_count - band.q_count;
  return j >= position - band.left && j <= position + band.right;
}

std::vector<Band> bands() {
  std::vector<Band> all;
  for (const int64_t q : {0, 1, 5, 64, 131}) {
    for (const int64_t k : {0, 1, 7, 64, 150}) {
      for (const int64_t left : {int64_t{0}, int64_t{3}, int64_t{70}, kUnbounded}) {
        for (const int64_t right : {int64_t{0}, int64_t{2}, int64_t{90}, kUnbounded}) {
          all.push_back({q, k, left, right});
        }
      }
    }
  }
  return all;
}

TEST(BandTest, KeysAndQueriesAreThoseThatSeeEachOther) {
  for (const Band& band : bands()) {
    for (int64_t i = 0; i < band.q_count; ++i) {
      const IndexRange keys = band.keys(i, 1);
      for (int64_t j = 0; j < band.k_count; ++j) {
        const IndexRange queries = band.queries(j, 1);
        EXPECT_EQ(j >= keys.begin && j < keys.end, sees(band, i, j));
        EXPECT_EQ(i >= queries.begin && i < queries.end, sees(band, i, j));
        EXPECT_EQ(band.whole(i, 1, j, 1), sees(band, i, j));
      }
    }
  }
}

// Tiles of keys that the kernels visit, all queries together.
int64_t tiles_visited(const Band& band, int64_t tile) {
  int64_t count = 0;
  for (int64_t q = 0; q < band.q_count; q += tile) {
    const IndexRange tiles = band.key_tiles(q, std::min(tile, band.q_count - q), tile);
    count += tiles.end - tiles.begin;
  }
  return count;
}

TEST(BandTest, TilesThatNobodySeesAreSkippedAndNoOthers) {
  constexpr int64_t kTile = 16;
  for (const Band& band : bands()) {
    int64_t seen = 0;
    for (int64_t q = 0; q < band.q_count; q += kTile) {
      for (int64_t k = 0; k < band.k_count; k += kTile) {
        bool any = false;
        for (int64_t i = q; i < std::min(q + kTile, band.q_count); ++i) {
          for (int64_t j = k; j < std::min(k + kTile, band.k_count); ++j) any |= sees(band, i, j);
        }
        seen += any;
      }
    }
    EXPECT_EQ(tiles_visited(band, kTile), seen)
        << band.q_count << " " << band.k_count << " " << band.left << " " << band.right;
  }
}

TEST(BandTest, WorkFollowsTheWindowNotTheLength) {
  constexpr int64_t kTile = 64;
  for (const int64_t length : {int64_t{4096}, int64_t{1} << 20}) {
    const int64_t tiles = length / kTile;
    // A tile of queries sees its own tile of keys and two before it.
    EXPECT_EQ(tiles_visited({length, length, 128, 0}, kTile), 3 * tiles - 3);
    EXPECT_EQ(tiles_visited({length, length, 64, 64}, kTile), 3 * tiles - 2);
    EXPECT_EQ(tiles_visited({length, length, kUnbounded, 0}, kTile), tiles * (tiles + 1) / 2);
  }
}

}  // namespace
}  // namespace muster
