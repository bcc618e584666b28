#include "worker/train/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "common/arena.h"
#include "common/error.h"
#include "kernels/cross_entropy/cross_entropy.h"
#include "worker/train/rehearsal.h"

namespace muster {
namespace {

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
  Rehearsal rehearsal(config, rank, world_size, context);
  MemoryPlan plan;
  const size_t lasting = arena->extent();
  plan.kept = kept->extent();
  plan.state = plan.kept + lasting;
  rehearsal.run();
  plan.step = arena->extent() - lasting;
  plan.scratch = scratch_of(config, compute_dtype);
  const int64_t group = shard_group_size(config.parallel, world_size);
  const size_t communicators = world_size == 1 ? 0 : group > 1 && group < world_size ? 3 : 1;
  plan.network = communicators * kNetwork;
  return plan;
}

void reserve_memory(ComputeDevice& device, const Config& config, int rank, int world_size,
                    const ReserveOptions& options) {
  if (!device.context().stream.device.is_cuda()) return;
  MemoryPlan plan = plan_memory(config, rank, world_size, device.context().dtype);
  plan.network += static_cast<size_t>(options.more_communicators) * kNetwork;
  if (options.connected) plan.network = 0;
  if (device.is_reserved(plan.kept, plan.tensors() - plan.kept)) return;
  device.give_back();
  // Kernels keep their scratch memory from one generation to the next.
  const auto find_available = [&] {
    return device.free_bytes() + std::min(device.scratch_bytes(), plan.scratch);
  };
  size_t available = find_available();
  while (plan.total() > available && options.make_room && options.make_room()) {
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
