// The step on a GPU beside the same step on the CPU.
#include <gtest/gtest.h>

#include <cstring>

#include "common/error.h"
#include "kernels/fp8/fp8.h"
#include "worker/device/compute_device.h"
#include "worker/elastic/handover.h"
#include "worker/train/memory_plan.h"
#include "worker/train/testing.h"
#include "worker/train/train_step.h"

namespace muster {
namespace {

using testing::make_steps;
using testing::tiny_run;
using testing::TinyStep;

class TrainStepGpu : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  }

  static std::vector<TinyStep> on_cpu(const Config& config) {
    SingleCommunicator communicator;
    TrainStep step(config, communicator, {});
    return make_steps(step, config, kSteps);
  }
  static std::vector<TinyStep> on_gpu(const Config& config, DType dtype) {
    ComputeDevice device(Device::cuda(0), dtype);
    device.configure(config);
    const MemoryPlan plan = plan_memory(config, 0, 1, dtype);
    device.reserve(plan.kept, plan.tensors() - plan.kept);
    SingleCommunicator communicator(device.context().stream);
    TrainStep step(config, communicator, device.context());
    auto steps = make_steps(step, config, kSteps);
    EXPECT_EQ(device.overflows(), 0) << "the plan missed something";
    EXPECT_LE(device.peak_bytes(), plan.total()) << "kernels took more scratch memory than planned";
    return steps;
  }
  static void expect_close(const std::vector<TinyStep>& a, const std::vector<TinyStep>& b,
                           double relative) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_NEAR(a[i].loss, b[i].loss, relative * a[i].loss) << "step " << i;
      EXPECT_NEAR(a[i].grad_norm, b[i].grad_norm, 10 * relative * a[i].grad_norm) << "step " << i;
    }
  }

  static constexpr int kSteps = 20;
};

TEST_P(TrainStepGpu, Float32AgreesWithTheCpu) {
  const Config config = tiny_run(GetParam());
  expect_close(on_cpu(config), on_gpu(config, DType::kFloat32), 1e-4);
}

TEST_P(TrainStepGpu, BFloat16StaysNear) {
  Config config = tiny_run(GetParam());
  const auto exact = on_cpu(config);
  expect_close(exact, on_gpu(config, DType::kBFloat16), 2e-2);
  config.precision.moments = "bfloat16";
  expect_close(exact, on_gpu(config, DType::kBFloat16), 2e-2);
}

// Every product of the blocks in float8: rounded to three or four bits, so only the course agrees.
TEST_P(TrainStepGpu, Fp8Trains) {
  Config config = tiny_run(GetParam());
  config.model.width = 32;
  config.model.head_dim = 8;
  config.model.ffn = 48;
  config.train.sequence_length = 16;
  if (!fp8_supported(Device::cuda(0))) GTEST_SKIP() << "this GPU has no float8 products";
  const auto exact = on_gpu(config, DType::kBFloat16);
  config.precision.matmul = "fp8";
  const auto rounded = on_gpu(config, DType::kBFloat16);
  expect_close(exact, rounded, 5e-2);
  EXPECT_NE(exact.front().loss, rounded.front().loss) << "nothing was rounded";
}

TEST_P(TrainStepGpu, CheckpointedBlocksChangeNoBit) {
  Config config = tiny_run(GetParam());
  const auto kept = on_gpu(config, DType::kBFloat16);
  config.memory.checkpoint = "block";
  const auto recomputed = on_gpu(config, DType::kBFloat16);
  for (int i = 0; i < kSteps; ++i) {
    EXPECT_EQ(kept[i].loss, recomputed[i].loss) << "step " << i;
    EXPECT_EQ(kept[i].grad_norm, recomputed[i].grad_norm) << "step " << i;
  }
}

TEST_P(TrainStepGpu, AStepThatDoesNotFitIsRefusedWithFigures) {
  Config config = tiny_run(GetParam());
  config.train.micro_batch = int64_t{1} << 28;
  ComputeDevice device(Device::cuda(0), DType::kBFloat16);
  try {
    reserve_memory(device, config, 0, 1);
    FAIL() << "that cannot fit";
  } catch (const Error& error) {
    const std::string what = error.what();
    for (const char* part : {"needs", "are free", "activations", "train.micro_batch"}) {
      EXPECT_NE(what.find(part), std::string::npos) << what;
    }
  }
}

// What a change of size does on a GPU: the state stays where it is while memory for the next
// generation is taken, and goes over from there.
TEST(GpuState, OutlivesTheMemoryThatItWasTrainedIn) {
  if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  const Config config = tiny_run("llama");
  ComputeDevice device(Device::cuda(0), DType::kBFloat16);
  device.configure(config);
  const Stream stream = device.context().stream;
  reserve_memory(device, config, 0, 1);
  SingleCommunicator communicator(stream);
  auto step = std::make_unique<TrainStep>(config, communicator, device.context());
  Vault vault(shape_of(step->model().units(), DType::kFloat32));
  make_steps(*step, config, 3);
  synchronize(stream);
  const PieceId id{.generation = 1, .world_size = 1, .part = 0, .step = 3};
  const auto before = vault.begin(id);
  copy_state(stream, before->state(), step->parameters().state());
  vault.keep(std::make_shared<StatePiece>(id, step->parameters().state(),
                                          step->parameters().state_memory()),
             {.updates = 3});
  step.reset();

  int calls = 0;
  reserve_memory(device, config, 0, 1, {.make_room = [&] { return ++calls == 0; }});
  EXPECT_EQ(calls, 0) << "there is room for both";
  step = std::make_unique<TrainStep>(config, communicator, device.context());
  make_steps(*step, config, 5);
  const HandoverPlan plan{.generation = 1, .step = 3, .holders = {0}, .owners = {0}};
  EXPECT_EQ(hand_over({}, plan, vault, step->parameters().state(), device.context()).updates, 3);
  const auto after = vault.begin({.generation = 2, .world_size = 1, .part = 0, .step = 3});
  copy_state(stream, after->state(), step->parameters().state());
  synchronize(stream);
  EXPECT_EQ(std::memcmp(after->bytes().raw(), before->bytes().raw(), after->bytes().bytes()), 0);

  vault.to_host(stream);
  EXPECT_TRUE(vault.find(id)->device().is_cpu());
  EXPECT_EQ(
      std::memcmp(vault.find(id)->bytes().raw(), before->bytes().raw(), before->bytes().bytes()),
      0);
  EXPECT_EQ(device.overflows(), 0);
}

INSTANTIATE_TEST_SUITE_P(Families, TrainStepGpu, ::testing::Values("llama", "gpt2"));

}  // namespace
}  // namespace muster
