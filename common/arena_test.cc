#include "common/arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <new>
#include <vector>

#include "common/rng.h"

namespace muster {
namespace {

using Block = std::shared_ptr<void>;

std::shared_ptr<Arena> small_arena(size_t bytes, std::shared_ptr<Allocator> overflow = nullptr) {
  return std::make_shared<Arena>(Device::cpu(),
                                 std::shared_ptr<void>(aligned_alloc(512, bytes), free), bytes,
                                 std::move(overflow));
}

ptrdiff_t between(const Block& a, const Block& b) {
  return static_cast<char*>(b.get()) - static_cast<char*>(a.get());
}

TEST(Arena, FillsTheSmallestHoleThatFits) {
  const auto arena = small_arena(16 << 10);
  const Block a = arena->allocate(2048);
  Block wide = arena->allocate(2048);
  const Block b = arena->allocate(512);
  Block narrow = arena->allocate(1024);
  const Block c = arena->allocate(512);
  const void* const wide_place = wide.get();
  const void* const narrow_place = narrow.get();
  wide.reset();
  narrow.reset();
  const Block first = arena->allocate(700);
  EXPECT_EQ(first.get(), narrow_place);
  const Block second = arena->allocate(1100);
  EXPECT_EQ(second.get(), wide_place);
  EXPECT_EQ(between(a, b), 4096);
  EXPECT_EQ(arena->extent(), 6144U);
}

TEST(Arena, MergesNeighboursInAnyOrder) {
  const auto arena = small_arena(8192);
  std::vector<Block> blocks;
  blocks.reserve(4);
  for (int i = 0; i < 4; ++i) blocks.push_back(arena->allocate(1024));
  const Block last = arena->allocate(512);
  const void* const start = blocks[0].get();
  for (const int i : {1, 3, 0, 2}) blocks[i].reset();
  EXPECT_EQ(arena->bytes_in_use(), 512U);
  const Block whole = arena->allocate(4096);
  EXPECT_EQ(whole.get(), start);
}

TEST(Arena, RefusesOrPassesOnWhatDoesNotFit) {
  const auto strict = small_arena(1024);
  const Block held = strict->allocate(1024);
  EXPECT_THROW(strict->allocate(1), std::bad_alloc);

  const auto lenient = small_arena(1024, std::make_shared<HostAllocator>());
  const Block inside = lenient->allocate(1000);
  const Block outside = lenient->allocate(100);
  EXPECT_EQ(lenient->overflows(), 1);
  EXPECT_EQ(lenient->bytes_in_use(), 1024U);
}

TEST(Arena, BlocksOutliveTheArena) {
  auto arena = small_arena(1024);
  const Block block = arena->allocate(8);
  arena.reset();
  *static_cast<double*>(block.get()) = 1.0;
}

// A random life of blocks: none overlap, and a range of exactly the planned size is enough and puts
// every block where the plan put it.
TEST(Arena, TheRealRangeFollowsThePlan) {
  const auto live = [](Arena& arena) {
    const CounterRng rng(3, RandomPurpose::kInit, 0);
    const Block base = arena.allocate(1);
    std::vector<std::pair<Block, size_t>> blocks;
    std::vector<ptrdiff_t> places;
    for (uint64_t i = 0; i < 2000; ++i) {
      if (!blocks.empty() && rng.bits(3 * i) % 2 == 0) {
        blocks.erase(blocks.begin() + static_cast<int64_t>(rng.bits(3 * i + 1) % blocks.size()));
        continue;
      }
      const size_t bytes = 1 + rng.bits(3 * i + 2) % 9000;
      const Block block = arena.allocate(bytes);
      const ptrdiff_t at = between(base, block);
      for (const auto& [other, size] : blocks) {
        const ptrdiff_t begin = between(base, other);
        EXPECT_TRUE(at + static_cast<ptrdiff_t>(bytes) <= begin ||
                    begin + static_cast<ptrdiff_t>(size) <= at);
      }
      places.push_back(at);
      blocks.emplace_back(block, bytes);
    }
    return places;
  };
  const auto plan = Arena::plan();
  const auto planned = live(*plan);
  const auto real = small_arena(plan->extent());
  EXPECT_EQ(live(*real), planned);
  EXPECT_EQ(real->extent(), plan->extent());
  EXPECT_EQ(plan->bytes_in_use(), 0U);
}

}  // namespace
}  // namespace muster
