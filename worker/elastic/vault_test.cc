#include "worker/elastic/vault.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

const StateShape kShape{.units = {17, 1, 30}, .moments = DType::kFloat32};

PieceId id(uint64_t generation, int64_t step, int part = 0) {
  return {.generation = generation, .world_size = 2, .part = part, .step = step};
}
void keep(Vault& vault, const PieceId& piece) {
  vault.keep(vault.begin(piece), {.updates = piece.step});
}

TEST(StatePiece, HoldsItsPartOfEveryUnitInOneBuffer) {
  for (const DType moments : {DType::kFloat32, DType::kBFloat16}) {
    Vault vault({kShape.units, moments});
    const auto piece = vault.begin({.generation = 1, .world_size = 3, .part = 2, .step = 4});
    ASSERT_EQ(piece->state().size(), 3u);
    size_t bytes = 0;
    for (size_t i = 0; i < 3; ++i) {
      const ShardState& one = piece->state()[i];
      EXPECT_EQ(one.range, owned_range(kShape.units[i], 3, 2));
      EXPECT_EQ(one.weight.numel(), one.range.size());
      EXPECT_EQ(one.m.dtype(), moments);
      bytes += one.weight.bytes() + one.m.bytes() + one.v.bytes();
    }
    EXPECT_EQ(piece->bytes().bytes(), bytes);
    EXPECT_EQ(vault.shape().bytes(3, 2), bytes);
  }
}

TEST(Vault, KeepsStateWhereItLies) {
  Vault vault(kShape);
  const Tensor memory({48}, DType::kFloat32);
  std::vector<ShardState> state;
  for (const int64_t numel : kShape.units) {
    const Range range = owned_range(numel, 2, 0);
    const TensorView view = memory.view().slice(0, range.size());
    state.push_back({static_cast<int>(state.size()), range, view, view, view});
  }
  vault.keep(std::make_shared<StatePiece>(id(1, 5), state, std::vector<Tensor>{memory}),
             {.updates = 5});
  const auto piece = vault.find(id(1, 5));
  ASSERT_NE(piece, nullptr);
  EXPECT_TRUE(piece->device().is_cpu());
  EXPECT_EQ(piece->state().front().weight.raw(), memory.view().raw());
  vault.to_host(Stream::cpu());
  EXPECT_EQ(vault.find(id(1, 5)), piece) << "it is there already";
}

TEST(Vault, ShowsOnlyWhatIsComplete) {
  Vault vault(kShape);
  const auto piece = vault.begin(id(1, 5));
  EXPECT_TRUE(vault.pieces().empty());
  vault.keep(piece, {.updates = 5});
  EXPECT_EQ(vault.pieces(), std::vector<PieceId>{id(1, 5)});
  ASSERT_NE(vault.find(id(1, 5)), nullptr);
  EXPECT_EQ(vault.find(id(1, 5))->progress.updates, 5);
  EXPECT_EQ(vault.find(id(1, 5, 1)), nullptr);
}

TEST(Vault, HasTwoVersionsUntilTheYoungerIsCommitted) {
  Vault vault(kShape);
  for (const int part : {0, 1}) keep(vault, id(1, 5, part));
  for (const int part : {0, 1}) keep(vault, id(1, 6, part));
  EXPECT_EQ(vault.pieces().size(), 4u);
  vault.commit(1, 6);
  EXPECT_EQ(vault.pieces(), (std::vector<PieceId>{id(1, 6, 0), id(1, 6, 1)}));
}

TEST(Vault, KeepsEarlierGenerationsUntilALaterOneCommits) {
  Vault vault(kShape);
  keep(vault, id(1, 6));
  keep(vault, id(2, 7));
  EXPECT_EQ(vault.pieces().size(), 2u);
  vault.commit(2, 7);
  EXPECT_EQ(vault.pieces(), std::vector<PieceId>{id(2, 7)});
}

TEST(Vault, UsesMemoryOfPiecesThatAreGoneAgain) {
  Vault vault(kShape);
  keep(vault, id(1, 5, 1));
  const void* memory = vault.find(id(1, 5, 1))->bytes().raw();
  vault.commit(1, 6);
  const auto larger = vault.begin(id(1, 7, 0));
  EXPECT_EQ(larger->bytes().raw(), memory);
  EXPECT_NE(vault.begin(id(1, 7, 1))->bytes().raw(), memory);
}

TEST(Vault, HasTheMemoryOfMirrorsBeforeTheyBegin) {
  Vault vault(kShape);
  EXPECT_FALSE(vault.prepared(2));
  EXPECT_EQ(vault.lacking(2), PieceMemory::kBuffers * static_cast<int64_t>(kShape.bytes(2, 0)));
  vault.prepare(2, vault.lacking(2), size_t{1} << 30);
  EXPECT_TRUE(vault.prepared(2)) << "on the CPU at once";
  EXPECT_EQ(vault.lacking(2), 0);
  EXPECT_FALSE(vault.prepared(1));
  vault.prepare(1, 1, std::nullopt);
  EXPECT_TRUE(vault.prepared(1));
}

TEST(Vault, MakesNoMirrorMemoryThatTheHostDoesNotHave) {
  Vault vault({.units = {int64_t{1} << 50}, .moments = DType::kFloat32});
  vault.prepare(2, vault.lacking(2), size_t{1} << 40);
  EXPECT_FALSE(vault.prepared(2));
}

}  // namespace
}  // namespace muster
