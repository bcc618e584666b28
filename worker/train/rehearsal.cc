#include "worker/train/rehearsal.h"

#include <algorithm>
#include <vector>

#include "worker/train/micro_batches.h"

namespace muster {
namespace {

// Samples of one document each, of the first token.
class BlankBatch {
 public:
  BlankBatch(int64_t samples, int64_t length)
      : tokens_(Tensor::zeros({samples * length}, DType::kInt32)),
        positions_({samples * length}, DType::kInt32),
        starts_({samples + 1}, DType::kInt32) {
    auto* positions = positions_.data<int32_t>();
    for (int64_t i = 0; i < samples * length; ++i) positions[i] = static_cast<int32_t>(i % length);
    auto* starts = starts_.data<int32_t>();
    for (int64_t i = 0; i <= samples; ++i) starts[i] = static_cast<int32_t>(i * length);
    batch_ = {.samples = samples,
              .sequence_length = length,
              .tokens = tokens_,
              .targets = tokens_,
              .positions = positions_,
              .cu_seqlens = starts_,
              .max_segment = length,
              .target_tokens = samples * length,
              .ids = {}};
  }
  const Batch& batch() const { return batch_; }

 private:
  Tensor tokens_;
  Tensor positions_;
  Tensor starts_;
  Batch batch_;
};

}  // namespace

// Says yes to everything.
class Rehearsal::AbsentPeers : public Communicator {
 public:
  AbsentPeers(int rank, int world_size) : rank_(rank), world_size_(world_size) {}
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::unique_ptr<Work> all_gather(TensorView, ConstTensorView) override {
    return completed_work();
  }
  std::unique_ptr<Work> reduce_scatter(TensorView, TensorView) override { return completed_work(); }
  std::unique_ptr<Work> all_reduce(TensorView) override { return completed_work(); }
  std::unique_ptr<Work> exchange(std::vector<Parcel>, std::vector<Parcel>) override {
    return completed_work();
  }
  void barrier() override {}
  void abort(const std::string&) noexcept override {}
  void check_alive() const override {}
  double wait_seconds() const override { return 0.0; }

 private:
  int rank_;
  int world_size_;
};

Rehearsal::Rehearsal(const Config& config, int rank, int world_size, const ComputeContext& context)
    : config_(config),
      context_(context),
      // More passes take no more memory than three: the first leaves sums, to which the others add,
      // and the second leaves reductions under way that do.
      passes_(std::min<int64_t>(
          3, pass_count(config.train.global_batch, world_size, config.train.micro_batch))) {
  const int group = static_cast<int>(shard_group_size(config.parallel, world_size));
  const bool grouped = group > 1 && group < world_size;
  world_ = std::make_unique<AbsentPeers>(rank, world_size);
  shard_ = std::make_unique<AbsentPeers>(rank % group, group);
  replicas_ = std::make_unique<AbsentPeers>(rank / group, world_size / group);
  const Groups groups = grouped ? Groups(*world_, *shard_, *replicas_) : Groups(*world_);
  step_ = std::make_unique<TrainStep>(config, groups, context);
}
Rehearsal::~Rehearsal() = default;

void Rehearsal::run() {
  const int64_t micro = config_.train.micro_batch;
  const int64_t length = config_.train.sequence_length;
  const BlankBatch batch(micro, length);
  const auto make_step = [&](const BlankBatch& of) {
    step_->begin(passes_);
    for (int64_t pass = 0; pass < passes_; ++pass) step_->train(of.batch());
    step_->update(0.0);
  };
  make_step(batch);
  // Where fewer rows fit no float8 product, they are kept in twice the bytes.
  if (context_.fp8 && micro > 1) make_step(BlankBatch(micro - 1, length));
  step_->begin_evaluation();
  step_->evaluate(batch.batch());
}

}  // namespace muster
