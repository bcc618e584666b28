#include "worker/train/memory_plan.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cstdlib>

#include "common/arena.h"
#include "worker/comm/testing.h"
#include "worker/train/testing.h"

namespace muster {
namespace {

using testing::make_steps;
using testing::tiny_run;

// What a real run in an arena takes at most, with the batches that only a GPU keeps beside the
// host's.
size_t run_in_arena(const Config& config, const Groups& groups) {
  const size_t bytes = 64 << 20;
  Arena arena(Device::cpu(), std::shared_ptr<void>(std::aligned_alloc(512, bytes), std::free),
              bytes);
  ComputeContext context;
  context.allocator = &arena;
  TrainStep step(config, groups, context);
  const testing::RandomBatch batch(1, 2, 12, config.model.vocab_size);
  make_steps(step, config, 2);
  step.begin_evaluation();
  step.evaluate(batch.batch());
  step.end_evaluation(Deadline::after(std::chrono::seconds(10)));
  const size_t tokens = config.train.micro_batch * config.train.sequence_length;
  const size_t slots = 2 * (((4 * tokens + 1) * 4 + 511) / 512 * 512);
  return arena.extent() + slots;
}

// Never more than the plan says, and exactly that.
TEST(MemoryPlan, IsWhatARunTakes) {
  for (const std::string family : {"llama", "gpt2"}) {
    for (const std::string checkpoint : {"none", "block", "every:2"}) {
      SCOPED_TRACE(::testing::Message() << family << " " << checkpoint);
      Config config = tiny_run(family);
      config.model.layers = 4;
      config.memory.checkpoint = checkpoint;
      SingleCommunicator communicator;
      EXPECT_EQ(run_in_arena(config, communicator),
                plan_memory(config, 0, 1, DType::kFloat32).tensors());
    }
  }
}

TEST(MemoryPlan, IsWhatAWorkerOfAShardGroupTakes) {
  for (const std::string mode : {"full", "grad", "optimizer", "none"}) {
    for (const int group : {1, 2, 4}) {
      SCOPED_TRACE(mode + " by " + std::to_string(group));
      Config config = tiny_run("llama");
      config.train.global_batch = 24;
      config.parallel.shard = mode;
      config.parallel.shard_group = group;
      testing::run_groups(4, group, [&](GroupedCommunicator& comm) {
        omp_set_num_threads(1);
        EXPECT_EQ(run_in_arena(config, comm.groups()),
                  plan_memory(config, comm.rank(), 4, DType::kFloat32).tensors());
      });
    }
  }
}

Config llama_1b() {
  Config config;
  config.model = {.family = "llama",
                  .vocab_size = 128256,
                  .width = 2048,
                  .layers = 16,
                  .heads = 32,
                  .kv_heads = 8,
                  .head_dim = 64,
                  .ffn = 8192};
  config.train.sequence_length = 4096;
  config.train.micro_batch = 4;
  config.train.global_batch = 4;
  return config;
}

TEST(MemoryPlan, KnowsWhatALargeModelNeedsWithoutTakingIt) {
  const Config config = llama_1b();
  const double parameters = 1235814400;
  const MemoryPlan plan = plan_memory(config, 0, 1, DType::kBFloat16);
  // Weights, their bfloat16 copy, two moments, gradients.
  EXPECT_NEAR(static_cast<double>(plan.state), parameters * (4 + 2 + 8 + 4), 0.01 * plan.state);
  EXPECT_GT(plan.step, size_t{15} << 30);
  EXPECT_LT(plan.step, size_t{25} << 30);
}

TEST(MemoryPlan, EachSettingLowersWhatItSaysItLowers) {
  const Config config = llama_1b();
  const MemoryPlan plan = plan_memory(config, 0, 1, DType::kBFloat16);
  Config lean = config;
  lean.memory.checkpoint = "block";
  EXPECT_LT(plan_memory(lean, 0, 1, DType::kBFloat16).step, plan.step / 3);
  lean = config;
  lean.train.micro_batch = 1;
  EXPECT_LT(plan_memory(lean, 0, 1, DType::kBFloat16).step, plan.step / 2);
  lean = config;
  lean.precision.moments = "bfloat16";
  EXPECT_LT(plan_memory(lean, 0, 1, DType::kBFloat16).state, plan.state - (size_t{4} << 30));
  lean = config;
  lean.parallel.shard = "full";
  EXPECT_LT(plan_memory(lean, 3, 8, DType::kBFloat16).state, plan.state / 7);
  // What is sharded depends on the size of the groups alone.
  const size_t of_four = plan_memory(lean, 3, 4, DType::kBFloat16).state;
  lean.parallel.shard_group = 4;
  EXPECT_EQ(plan_memory(lean, 3, 8, DType::kBFloat16).state, of_four);
}

}  // namespace
}  // namespace muster
