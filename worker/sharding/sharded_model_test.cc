// The real model on sharded parameters: one worker's losses are those of any number of workers.
#include <gtest/gtest.h>
#include <omp.h>

#include <string>

#include "worker/comm/testing.h"
#include "worker/model/model.h"
#include "worker/model/testing.h"
#include "worker/sharding/sharded_parameters.h"
#include "worker/sharding/testing.h"

namespace muster {
namespace {

constexpr int64_t kSamples = 6;
constexpr int64_t kLength = 12;

struct Run {
  std::string family = "llama";
  int world = 1;
  std::string mode = "full";
  int64_t steps = 10;
  std::string checkpoint = "none";
};

// Mean losses of the steps. Every rank draws the global batch and takes its slice.
std::vector<double> train(const Run& run) {
  std::vector<double> losses;
  testing::run_ranks(run.world, [&](Communicator& comm) {
    omp_set_num_threads(1);
    const ModelConfig config = testing::tiny_model(run.family);
    const Model model(config, kLength, {});
    ShardedParameters parameters(model.units(), comm, {.mode = run.mode}, {});
    parameters.initialise(3);
    const auto policy = CheckpointPolicy::parse(run.checkpoint);
    const int64_t passes = kSamples / run.world;
    testing::HostStep figures;
    for (int64_t step = 0; step < run.steps; ++step) {
      parameters.begin_step(passes);
      figures.begin();
      for (int64_t pass = 0; pass < passes; ++pass) {
        const int64_t sample = step * kSamples + comm.rank() * passes + pass;
        const testing::RandomBatch batch(sample, 1, kLength, config.vocab_size);
        model.forward_backward(parameters, batch.batch(), policy, figures.loss_sum());
        figures.add(0.0, static_cast<double>(batch.batch().target_tokens));
      }
      const StepControl control = figures.update(parameters, {}, 3e-3);
      if (comm.rank() == 0) losses.push_back(control.loss);
    }
  });
  return losses;
}

void expect_close(const std::vector<double>& a, const std::vector<double>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-5 * a[i]) << "step " << i;
}

TEST(ShardedModel, FiftyStepsAgreeAtOneTwoAndThreeWorkers) {
  const std::vector<double> one = train({.world = 1, .steps = 50});
  EXPECT_LT(one.back(), 0.98 * one.front()) << "it learns nothing";
  for (const int world : {2, 3}) {
    SCOPED_TRACE(world);
    expect_close(one, train({.world = world, .steps = 50}));
  }
}

TEST(ShardedModel, ModesAgree) {
  const std::vector<double> one = train({});
  for (const std::string mode : {"grad", "optimizer", "none"}) {
    SCOPED_TRACE(mode);
    expect_close(one, train({.world = 2, .mode = mode}));
  }
}

TEST(ShardedModel, Gpt2Agrees) {
  expect_close(train({.family = "gpt2"}), train({.family = "gpt2", .world = 3}));
}

// Blocks that are run again gather their weights again: the same bits.
TEST(ShardedModel, CheckpointedBlocksChangeNoBit) {
  EXPECT_EQ(train({.world = 2}), train({.world = 2, .checkpoint = "block"}));
}

}  // namespace
}  // namespace muster
