#include "worker/train/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "common/arena.h"
#include "common/error.h"
#include "kernels/cross_entropy/cross_entropy.h"
#include "worker/train/micro_batches.h"
#include "worker/train/train_step.h"

namespace muster {
namespace {

// Stands in for the other ranks: says yes to everything.
class PlanCommunicator : public Communicator {
 public:
  PlanCommunicator(int rank, int world_size) : rank_(rank), world_size_(world_size) {}
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::unique_ptr<Work> all_gather(TensorView, ConstTensorView) override { return done(); }
  std::unique_ptr<Work> reduce_scatter(TensorView, TensorView) override { return done(); }
  std::unique_ptr<Work> all_reduce(TensorView) override { return done(); }
  void barrier() override {}
  void abort(const std::string&) noexcept override {}
  void check_alive() const override {}
  double wait_seconds() const override { return 0.0; }

 private:
  class Done : public Work {
   public:
    void wait(const Stream&) override {}
  };
  static std::unique_ptr<Work> done() { return std::make_unique<Done>(); }

  int rank_;
  int world_size_;
};

// The largest micro-batch, of one document a sample. Only its shape matters.
class PlanBatch {
 public:
  PlanBatch(int64_t samples, int64_t length)
      : tokens_({samples * length}, DType::kInt32), starts_({samples + 1}, DType::kInt32) {
    batch_ = {.samples = samples,
              .sequence_length = length,
              .tokens = tokens_,
              .targets = tokens_,
              .positions = tokens_,
              .cu_seqlens = starts_,
              .max_segment = length,
              .target_tokens = samples * length,
              .ids = {}};
  }
  const Batch& batch() const { return batch_; }

 private:
  Tensor tokens_;
  Tensor starts_;
  Batch batch_;
};

double gib(size_t bytes) {
  return static_cast<double>(bytes) / (1 << 30);
}

// What kernels ask workspace() for (kernels/cuda/device.h): logits, or the backward attention's
// float32 sums, one after the other in the same place; and cuBLASLt's and the column sums' own.
size_t scratch_of(const Config& config, DType dtype) {
  const int64_t tokens = config.train.micro_batch * config.train.sequence_length;
  const int64_t row_bytes = static_cast<int64_t>(size_of(dtype)) * config.model.vocab_size;
  const int64_t logits =
      std::clamp(CrossEntropyOptions{}.gpu_workspace_bytes, row_bytes, tokens * row_bytes);
  const int64_t attention = tokens * config.model.heads * (config.model.head_dim * 4 + 8);
  constexpr int64_t kOthers = int64_t{96} << 20;
  return static_cast<size_t>(std::max(logits, attention) + kOthers);
}

// Of one communicator, measured on two H200s: 0.9 GiB.
constexpr size_t kNetwork = size_t{1} << 30;

}  // namespace

MemoryPlan plan_memory(const Config& config, int rank, int world_size, DType compute_dtype) {
  const std::shared_ptr<Arena> arena = Arena::plan();
  const std::shared_ptr<Arena> kept = Arena::plan();
  const ComputeContext context{.stream = {Device::plan(), nullptr},
                               .allocator = arena.get(),
                               .state_allocator = kept.get(),
                               .dtype = compute_dtype,
                               .fp8 = config.precision.matmul == "fp8"};
  const int group = static_cast<int>(shard_group_size(config.parallel, world_size));
  PlanCommunicator world(rank, world_size);
  PlanCommunicator shard(rank % group, group);
  PlanCommunicator replicas(rank / group, world_size / group);
  const bool grouped = group > 1 && group < world_size;
  TrainStep step(config, grouped ? Groups(world, shard, replicas) : Groups(world), context);
  MemoryPlan plan;
  const size_t lasting = arena->extent();
  plan.kept = kept->extent();
  plan.state = plan.kept + lasting;
  const PlanBatch batch(config.train.micro_batch, config.train.sequence_length);
  // More passes take no more memory than three: the first leaves sums, to which the others add, and
  // the second leaves reductions under way that do.
  const int64_t passes = std::min<int64_t>(
      3, pass_count(config.train.global_batch, world_size, config.train.micro_batch));
  step.begin(passes);
  for (int64_t pass = 0; pass < passes; ++pass) step.train(batch.batch());
  step.update(0.0);
  if (context.fp8 && config.train.micro_batch > 1) {
    // Where fewer rows fit no float8 product, they are kept in twice the bytes.
    const PlanBatch fewer(config.train.micro_batch - 1, config.train.sequence_length);
    step.begin(passes);
    for (int64_t pass = 0; pass < passes; ++pass) step.train(fewer.batch());
    step.update(0.0);
  }
  step.begin_evaluation();
  step.evaluate(batch.batch());
  step.end_evaluation(Deadline::now());
  plan.step = arena->extent() - lasting;
  plan.scratch = scratch_of(config, compute_dtype);
  const size_t communicators = grouped ? 3 : world_size > 1 ? 1 : 0;
  plan.network = communicators * kNetwork;
  return plan;
}

void reserve_memory(ComputeDevice& device, const Config& config, int rank, int world_size,
                    const std::function<void()>& make_room) {
  if (!device.context().stream.device.is_cuda()) return;
  const MemoryPlan plan = plan_memory(config, rank, world_size, device.context().dtype);
  if (device.is_reserved(plan.kept, plan.tensors() - plan.kept)) return;
  device.give_back();
  // Kernels keep their scratch memory from one generation to the next.
  const auto find_available = [&] {
    return device.free_bytes() + std::min(device.scratch_bytes(), plan.scratch);
  };
  size_t available = find_available();
  if (plan.total() > available && make_room) {
    make_room();
    available = find_available();
  }
  if (plan.total() > available) {
    throw Error(fmt::format(
        "this step needs {:.1f} GiB of GPU memory and {:.1f} GiB are free: {:.1f} GiB for weights, "
        "moments and gradient sums, {:.1f} GiB for activations and gathered weights, {:.1f} GiB "
        "for "
        "kernels and the network; lower train.micro_batch (now {}) or train.sequence_length ({}), "
        "set memory.checkpoint = \"block\" (\"{}\"), precision.moments = \"bfloat16\" (\"{}\"), or "
        "use more workers (now {}) with parallel.shard = \"full\" (\"{}\") and "
        "parallel.shard_group = 0 ({})",
        gib(plan.total()), gib(available), gib(plan.state), gib(plan.step),
        gib(plan.scratch + plan.network), config.train.micro_batch, config.train.sequence_length,
        config.memory.checkpoint, config.precision.moments, world_size, config.parallel.shard,
        config.parallel.shard_group));
  }
  device.reserve(plan.kept, plan.tensors() - plan.kept);
}

}  // namespace muster
