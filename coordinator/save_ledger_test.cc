#include "coordinator/save_ledger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster {
namespace {

proto::ShardSaved shard(int rank, int64_t step, uint64_t generation = 1) {
  proto::ShardSaved saved;
  saved.set_generation(generation);
  saved.set_rank(rank);
  saved.set_step(step);
  saved.set_part(rank);
  saved.set_file("shard-" + std::to_string(rank));
  saved.set_bytes(100 + rank);
  saved.set_xxh3(7);
  if (rank == 0) saved.set_manifest_json("{}");
  return saved;
}

TEST(SaveLedgerTest, IsCompleteWithTheLastShard) {
  SaveLedger ledger(1, 2);
  ledger.expect(10);
  EXPECT_FALSE(ledger.add(shard(1, 10)));
  EXPECT_FALSE(ledger.add(shard(1, 10))) << "twice the same rank";
  const auto save = ledger.add(shard(0, 10));
  ASSERT_TRUE(save);
  EXPECT_TRUE(save->error.empty());
  EXPECT_EQ(save->worker_json, "{}");
  ASSERT_EQ(save->files.size(), 2u);
  EXPECT_EQ(save->files[0].name, "shard-0");
  EXPECT_EQ(save->files[1].bytes, 101);
  EXPECT_TRUE(ledger.empty());
  EXPECT_FALSE(ledger.add(shard(0, 10)));
}

TEST(SaveLedgerTest, AnErrorNamesItsRank) {
  SaveLedger ledger(1, 2);
  ledger.expect(10);
  proto::ShardSaved failed = shard(1, 10);
  failed.set_error("shard-1: No space left on device");
  EXPECT_FALSE(ledger.add(failed)) << "the others may still be writing";
  EXPECT_EQ(ledger.add(shard(0, 10))->error, "worker 1: shard-1: No space left on device");
}

// Shard groups: the ranks' parts are not in the order of the ranks.
TEST(SaveLedgerTest, FilesComeInTheOrderOfTheirParts) {
  SaveLedger ledger(1, 4);
  ledger.expect(10);
  std::optional<CompleteSave> save;
  for (int rank = 0; rank < 4; ++rank) {
    proto::ShardSaved saved = shard(rank, 10);
    saved.set_part(rank % 2 * 2 + rank / 2);
    save = ledger.add(saved);
  }
  ASSERT_TRUE(save);
  EXPECT_EQ(save->error, "");
  ASSERT_EQ(save->files.size(), 4u);
  EXPECT_EQ(save->files[0].name, "shard-0");
  EXPECT_EQ(save->files[1].name, "shard-2");
  EXPECT_EQ(save->files[2].name, "shard-1");
  EXPECT_EQ(save->files[3].name, "shard-3");
}

TEST(SaveLedgerTest, APartThatCannotBeIsAnError) {
  for (const int part : {0, 2, -1}) {
    SaveLedger ledger(1, 2);
    ledger.expect(10);
    proto::ShardSaved wrong = shard(1, 10);
    wrong.set_part(part);
    EXPECT_FALSE(ledger.add(wrong));
    EXPECT_THAT(ledger.add(shard(0, 10))->error, testing::HasSubstr("worker 1: part"));
  }
}

TEST(SaveLedgerTest, WhatNobodyAskedForIsIgnored) {
  SaveLedger ledger(2, 1);
  ledger.expect(10);
  EXPECT_FALSE(ledger.add(shard(0, 11, 2)));
  EXPECT_FALSE(ledger.add(shard(0, 10, 1)));
  EXPECT_FALSE(ledger.add(shard(3, 10, 2)));
  EXPECT_FALSE(ledger.add(shard(-1, 10, 2)));
  EXPECT_FALSE(ledger.empty());
}

}  // namespace
}  // namespace muster
