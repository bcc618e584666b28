#include "worker/train/train_step.h"

#include <chrono>
#include <cstring>
#include <thread>

#include "common/error.h"
#include "kernels/elementwise/elementwise.h"

namespace muster {
namespace {

DType dtype_named(const std::string& name) {
  return name == "bfloat16" ? DType::kBFloat16 : DType::kFloat32;
}

ShardingOptions sharding_of(const Config& config, int world_size) {
  const bool alone = shard_group_size(config.parallel, world_size) == 1;
  const bool keep = config.parallel.shard == "full" && !config.parallel.reshard_after_forward;
  return {.mode = alone  ? "none"
                  : keep ? "grad"
                         : config.parallel.shard,
          .prefetch_units = config.parallel.prefetch_units,
          .reduce_dtype = dtype_named(config.parallel.reduce_dtype),
          .moments_dtype = dtype_named(config.precision.moments)};
}

}  // namespace

Readback::Readback(size_t bytes, const ComputeContext& context)
    : stream_(context.stream),
      host_({static_cast<int64_t>(bytes)}, DType::kUInt8, pinned_allocator()),
      event_(context.stream.device) {}

void Readback::start(ConstTensorView from) {
  MUSTER_CHECK(from.bytes() == host_.bytes());
  copy(stream_, host_, ConstTensorView(from.raw(), DType::kUInt8, host_.shape(), from.device()));
  event_.record(stream_);
}

const void* Readback::wait(Deadline deadline, const Communicator& communicator) const {
  // Steps take milliseconds to seconds: a look every 50 µs costs them nothing.
  constexpr std::chrono::microseconds kBetweenLooks(50);
  // Of one that is alone nothing that is aborted touches the device.
  const bool shared = communicator.world_size() > 1;
  while (!event_.done()) {
    if (shared) communicator.check_alive();
    if (deadline.passed()) {
      throw TimeoutError("the GPU has not finished its step within elastic.collective_timeout_s");
    }
    std::this_thread::sleep_for(kBetweenLooks);
  }
  // An abort may have left anything on a GPU. On the CPU what has been computed is right, and a
  // generation that ends only now does not undo it.
  if (shared && stream_.device.is_cuda()) communicator.check_alive();
  return host_.view().raw();
}

TrainStep::TrainStep(const Config& config, const Groups& groups, const ComputeContext& context)
    : config_(config),
      communicator_(groups.world),
      context_(context),
      model_(config.model, config.train.sequence_length, context),
      parameters_(model_.units(), groups, sharding_of(config, groups.world.world_size()), context),
      policy_(CheckpointPolicy::parse(config.memory.checkpoint)),
      upload_(config.train.micro_batch * config.train.sequence_length, context),
      sums_({3}, DType::kFloat64, *context.allocator),
      control_({static_cast<int64_t>(sizeof(StepControl))}, DType::kUInt8, *context.allocator) {
  for (Turn& turn : turns_) {
    turn.tokens = Tensor({1}, DType::kFloat64, pinned_allocator());
    turn.outcome = std::make_unique<Readback>(sizeof(StepControl), context);
  }
  set_progress({});
}

void TrainStep::set_progress(const StepControl& control) {
  copy(context_.stream, control_, ConstTensorView(&control, DType::kUInt8, control_.shape()));
  for (Turn& turn : turns_) turn.outcome->start(control_);
  synchronize(context_.stream);
}

void TrainStep::begin(int64_t passes) {
  parameters_.begin_step(passes);
  fill_zero(context_.stream, sums_);
  tokens_ = 0.0;
}

void TrainStep::train(const Batch& batch) {
  model_.forward_backward(parameters_, upload_.upload(batch), policy_, sums_.view().slice(1, 2));
  tokens_ += static_cast<double>(batch.target_tokens);
}

void TrainStep::send_tokens() {
  const Turn& turn = turns_[updates_ % 2];
  *turn.tokens.data<double>() = tokens_;
  copy(context_.stream, sums_.view().slice(2, 3), turn.tokens);
}

void TrainStep::update(double lr) {
  send_tokens();
  const OptimizerConfig& optimizer = config_.optimizer;
  parameters_.update(optimizer,
                     {.lr = lr,
                      .beta1 = optimizer.beta1,
                      .beta2 = optimizer.beta2,
                      .clip_norm = optimizer.clip_norm,
                      .spike_factor = config_.train.spike_factor},
                     config_.run.seed, sums_, control_);
  turns_[updates_ % 2].outcome->start(control_);
  ++updates_;
}

StepControl TrainStep::outcome(int behind, Deadline deadline) const {
  MUSTER_CHECK(behind >= 0 && behind < 2);
  const Turn& turn = turns_[(updates_ + 1 - behind) % 2];
  StepControl control;
  std::memcpy(&control, turn.outcome->wait(deadline, communicator_), sizeof(control));
  return control;
}

void TrainStep::begin_evaluation() {
  fill_zero(context_.stream, sums_);
  tokens_ = 0.0;
}

void TrainStep::evaluate(const Batch& batch) {
  model_.forward(parameters_, upload_.upload(batch), sums_.view().slice(1, 2));
  tokens_ += static_cast<double>(batch.target_tokens);
}

TrainStep::Evaluation TrainStep::end_evaluation(Deadline deadline) {
  send_tokens();
  const TensorView sums = sums_.view().slice(1, 3);
  communicator_.all_reduce(sums)->wait(context_.stream);
  Readback result(sums.bytes(), context_);
  result.start(sums);
  Evaluation evaluation;
  std::memcpy(&evaluation, result.wait(deadline, communicator_), sizeof(evaluation));
  return evaluation;
}

}  // namespace muster
