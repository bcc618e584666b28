#include "worker/comm/groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "worker/comm/testing.h"

namespace muster {
namespace {

using ::testing::HasSubstr;
using testing::run_groups;

// Every rank sends 10^rank, so that a sum says who was in it.
double sum_over(Communicator& communicator, int world_rank) {
  double value = 1.0;
  for (int i = 0; i < world_rank; ++i) value *= 10.0;
  communicator.all_reduce(TensorView(&value, DType::kFloat64, {1}))->wait(Stream::cpu());
  return value;
}

TEST(Groups, ShardGroupsAreNeighboursAndReplicasHoldTheSame) {
  const double shard_sums[] = {11, 11, 1100, 1100, 110000, 110000};
  const double replica_sums[] = {10101, 101010, 10101, 101010, 10101, 101010};
  run_groups(6, 2, [&](GroupedCommunicator& all) {
    const Groups groups = all.groups();
    const int rank = all.rank();
    ASSERT_NE(groups.replicas, nullptr);
    EXPECT_EQ(groups.world.world_size(), 6);
    EXPECT_EQ(groups.world.rank(), rank);
    EXPECT_EQ(groups.shard.world_size(), 2);
    EXPECT_EQ(groups.shard.rank(), rank % 2);
    EXPECT_EQ(groups.replicas->world_size(), 3);
    EXPECT_EQ(groups.replicas->rank(), rank / 2);
    EXPECT_EQ(sum_over(groups.world, rank), 111111);
    EXPECT_EQ(sum_over(groups.shard, rank), shard_sums[rank]);
    EXPECT_EQ(sum_over(*groups.replicas, rank), replica_sums[rank]);
    all.barrier();
    EXPECT_GT(all.wait_seconds(), groups.shard.wait_seconds());
  });
}

TEST(Groups, OneGroupOrGroupsOfOneNeedNoMoreThanTheWorld) {
  for (const int group : {1, 2}) {
    run_groups(2, group, [](GroupedCommunicator& all) {
      const Groups groups = all.groups();
      EXPECT_EQ(&groups.shard, &groups.world);
      EXPECT_EQ(groups.replicas, nullptr);
      EXPECT_EQ(sum_over(groups.shard, all.rank()), 11);
    });
  }
}

// A group that breaks ends the rank's others once it aborts, and its peers' one after the other;
// the error names the rank as the world does.
TEST(Groups, AbortEndsThemAllAndErrorsNameTheWorldsRanks) {
  std::mutex mutex;
  std::set<std::string> reasons;
  run_groups(4, 2, [&](GroupedCommunicator& all) {
    all.barrier();
    const Groups groups = all.groups();
    if (all.rank() == 3) {
      all.abort("rank 3 gives up");
      EXPECT_THROW(all.check_alive(), PeerError);
      EXPECT_THROW(groups.shard.check_alive(), PeerError);
      EXPECT_THROW(groups.replicas->check_alive(), PeerError);
      return;
    }
    if (all.rank() == 0) {  // in no group with rank 3 but the world
      EXPECT_THROW(all.barrier(), PeerError);
      return;
    }
    Communicator& with_three = all.rank() == 2 ? groups.shard : *groups.replicas;
    try {
      with_three.barrier();
      ADD_FAILURE() << "rank 3 is gone";
    } catch (const PeerError& error) {
      const std::lock_guard lock(mutex);
      reasons.insert(error.what());
    }
    EXPECT_THROW(all.check_alive(), PeerError);
  });
  ASSERT_FALSE(reasons.empty());
  for (const std::string& reason : reasons) EXPECT_THAT(reason, HasSubstr("lost rank 3"));
}

}  // namespace
}  // namespace muster
