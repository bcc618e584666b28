// The training contract from outside: the loss curve and the samples of a run do not depend on how
// it is spread.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/e2e/sandbox.h"

namespace muster {
namespace {

TEST(WorldSize, LossesOfOneTwoAndThreeWorkersAgree) {
  Sandbox sandbox;
  sandbox.train("w1", 1);
  const auto one = sandbox.losses("w1");
  ASSERT_EQ(one.size(), 50U);
  EXPECT_LT(one.back(), one.front() - 1.0) << "it learns nothing";
  for (int workers : {2, 3}) {
    const std::string name = "w" + std::to_string(workers);
    sandbox.train(name, workers);
    expect_same_losses(one, sandbox.losses(name), name);
  }
}

TEST(WorldSize, AnUnevenBatchGivesTheSameLosses) {
  Sandbox sandbox;
  const std::vector<std::string> uneven = {"train.global_batch=7", "train.micro_batch=2",
                                           "train.steps=20",       "model.layers=2",
                                           "model.width=34",       "model.head_dim=10"};
  sandbox.train("w1", 1, uneven);
  sandbox.train("w3", 3, uneven);
  expect_same_losses(sandbox.losses("w1"), sandbox.losses("w3"), "7 samples on 3 workers");
}

TEST(WorldSize, ShardModesAgree) {
  Sandbox sandbox;
  sandbox.train("full", 2);
  for (const char* mode : {"grad", "optimizer", "none"}) {
    sandbox.train(mode, 2, {std::string("parallel.shard=") + mode});
    expect_same_losses(sandbox.losses("full"), sandbox.losses(mode), mode);
  }
}

TEST(WorldSize, ShardGroupsAgreeAndLeaveNoTraceInACheckpoint) {
  Sandbox sandbox;
  const std::vector<std::string> small = {"train.steps=12", "model.layers=2",
                                          "schedule.type=constant", "schedule.warmup_steps=2"};
  sandbox.train("one", 1, small);
  std::vector<std::string> grouped = small;
  grouped.emplace_back("parallel.shard_group=2");
  grouped.emplace_back("train.micro_batch=1");
  grouped.emplace_back("train.steps=6");
  sandbox.train("groups", 4, grouped);
  EXPECT_EQ(sandbox.losses("groups").size(), 6U);
  std::vector<std::string> rest = small;
  rest.emplace_back("run.resume=must");
  sandbox.train("groups", 3, rest);
  expect_same_losses(sandbox.losses("one"), sandbox.losses("groups"),
                     "4 workers in groups of 2, then 3");

  const Outcome refused = sandbox.run(sandbox.train_arguments("odd", 3, grouped));
  EXPECT_FALSE(refused.status.ok());
  EXPECT_NE(refused.output.find("parallel.shard_group: 2 does not divide the number of workers, 3"),
            std::string::npos)
      << refused.output;
}

TEST(WorldSize, CheckpointedBlocksChangeNoBit) {
  Sandbox sandbox;
  sandbox.train("none", 2, {"memory.checkpoint=none"});
  for (const char* policy : {"block", "every:2"}) {
    sandbox.train("run", 2, {std::string("memory.checkpoint=") + policy, "run.resume=auto"});
    EXPECT_EQ(sandbox.losses("none"), sandbox.losses("run")) << policy;
    std::filesystem::remove_all(sandbox.path("run"));
  }
}

TEST(WorldSize, TheSamplesOfAStepAreTheSameAndComeOnceAnEpoch) {
  Sandbox sandbox;
  sandbox.train("w1", 1, {"train.steps=180"});
  sandbox.train("w3", 3, {"train.steps=180"});
  const auto one = sandbox.samples("w1");
  const auto three = sandbox.samples("w3");
  ASSERT_EQ(one.size(), 180U);
  std::vector<int64_t> order;
  for (const auto& [step, line] : one) {
    ASSERT_TRUE(three.contains(step));
    EXPECT_EQ(line.at("samples"), three.at(step).at("samples")) << "step " << step;
    EXPECT_EQ(line.at("hashes"), three.at(step).at("hashes")) << "step " << step;
    EXPECT_EQ(line.at("samples").size(), 12U);
    for (int64_t id : line.at("samples")) order.push_back(id);
  }
  // The first epoch ends where the first sample comes again, or inside the step before.
  const int64_t samples = *std::max_element(order.begin(), order.end()) + 1;
  ASSERT_GT(static_cast<int64_t>(order.size()), 2 * samples) << "the run must cover two epochs";
  const int64_t whole_steps = samples / 12;
  std::set<int64_t> first(order.begin(), order.begin() + whole_steps * 12);
  EXPECT_EQ(static_cast<int64_t>(first.size()), whole_steps * 12)
      << "a sample came twice in the first epoch";
  std::map<int64_t, int> counts;
  for (int64_t id : order) ++counts[id];
  EXPECT_EQ(static_cast<int64_t>(counts.size()), samples) << "a sample never came";
  const int64_t epochs = static_cast<int64_t>(order.size()) / samples;
  for (const auto& [id, count] : counts) {
    EXPECT_TRUE(count == epochs || count == epochs + 1)
        << "sample " << id << " came " << count << " times";
  }
}

}  // namespace
}  // namespace muster
