#include "worker/sharding/gradient_reducer.h"

#include <utility>

#include "kernels/elementwise/elementwise.h"

namespace muster {
namespace {

// Full gradient buffers that may wait for the network; more would cost memory and hide nothing.
constexpr size_t kMostUnderWay = 2;

}  // namespace

GradientReducer::GradientReducer(const std::vector<FlatUnit>& units, const Groups& groups,
                                 ShardMode mode, DType reduce_dtype, const ComputeContext& context)
    : units_(units),
      groups_(groups),
      mode_(mode),
      reduce_dtype_(reduce_dtype),
      context_(context),
      state_(units.size()) {
  int64_t total = 0;
  for (const FlatUnit& unit : units_) total += unit.room;
  reduced_ = Tensor({total}, DType::kFloat32, *context_.allocator);
  fill_zero(context_.stream, reduced_);
  int64_t at = 0;
  for (size_t i = 0; i < units_.size(); ++i) {
    state_[i].sum = reduced_.view().slice(at, at + units_[i].shard);
    at += units_[i].room;
  }
}

void GradientReducer::begin_step(int64_t passes) {
  MUSTER_CHECK(passes > 0);
  passes_ = passes;
}

TensorView GradientReducer::full(int unit) {
  Unit& state = state_[unit];
  const FlatUnit& flat = units_[unit];
  if (mode_ == ShardMode::kNone) return state.sum;
  if (!state.full.defined()) {
    state.full = Tensor({flat.padded}, DType::kFloat32, *context_.allocator);
    fill_zero(context_.stream, state.full.view().slice(flat.numel, flat.padded));
  }
  return state.full;
}

UnitGradients GradientReducer::gradients(int unit) {
  UnitGradients gradients{units_[unit].parameters(full(unit)), !state_[unit].touched};
  state_[unit].touched = true;
  if (!gradients.fresh) return gradients;
  const auto& specs = units_[unit].spec.parameters;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!specs[i].written_first) fill_zero(context_.stream, gradients.views[i]);
  }
  return gradients;
}

void GradientReducer::gradients_done(int unit) {
  Unit& state = state_[unit];
  ++state.passes;
  MUSTER_CHECK(state.touched, units_[unit].spec.name + ": done without gradients");
  MUSTER_CHECK(state.passes <= passes_, units_[unit].spec.name + ": more passes than announced");
  if (every_pass() || state.passes == passes_) reduce(unit);
}

void GradientReducer::reduce(int unit) {
  Unit& state = state_[unit];
  Reduction reduction{unit, state.full, {}, state.passes == passes_, nullptr};
  TensorView travels = full(unit);
  if (reduce_dtype_ != DType::kFloat32 && groups_.world.world_size() > 1) {
    reduction.full = Tensor(travels.shape(), reduce_dtype_, *context_.allocator);
    copy_cast(context_.stream, reduction.full, travels);
    travels = reduction.full;
  }
  if (mode_ == ShardMode::kNone) {
    reduction.work = groups_.world.all_reduce(travels);
    under_way_.push_back(std::move(reduction));
    return;
  }
  TensorView own = state.sum;
  if (state.passes > 1 && every_pass()) {
    reduction.own = Tensor(own.shape(), travels.dtype(), *context_.allocator);
    own = reduction.own;
  } else if (travels.dtype() != DType::kFloat32) {
    own = units_[unit].own_shard(travels);
  }
  reduction.work = groups_.shard.reduce_scatter(own, travels);
  under_way_.push_back(std::move(reduction));
  state.full = {};
  state.touched = false;
  while (under_way_.size() > kMostUnderWay) complete_oldest();
}

// Oldest first, so that a unit's passes are added in their order.
void GradientReducer::complete_oldest() {
  const Reduction reduction = std::move(under_way_.front());
  under_way_.pop_front();
  reduction.work->wait(context_.stream);
  const TensorView sum = state_[reduction.unit].sum;
  if (reduction.own.defined()) {
    TensorView own = reduction.own;
    Tensor wide;
    if (own.dtype() != sum.dtype()) {
      wide = Tensor(own.shape(), sum.dtype(), *context_.allocator);
      copy_cast(context_.stream, wide, own);
      own = wide;
    }
    add(context_.stream, sum, sum, own);
  } else if (reduction.full.defined() && reduction.full.dtype() != sum.dtype()) {
    const TensorView full = reduction.full;
    copy_cast(context_.stream, sum,
              mode_ == ShardMode::kNone ? full : units_[reduction.unit].own_shard(full));
  }
  if (reduction.last && mode_ != ShardMode::kNone && groups_.replicas != nullptr) {
    replicating_.push_back(groups_.replicas->all_reduce(sum));
  }
}

void GradientReducer::complete_all() {
  while (!under_way_.empty()) complete_oldest();
  while (!replicating_.empty()) {
    // Taken out first: a wait that throws has consumed it.
    const std::unique_ptr<Work> work = std::move(replicating_.back());
    replicating_.pop_back();
    work->wait(context_.stream);
  }
}

void GradientReducer::finish() {
  complete_all();
  for (size_t i = 0; i < state_.size(); ++i) {
    MUSTER_CHECK(state_[i].passes == passes_,
                 units_[i].spec.name + ": fewer passes than announced");
  }
}

void GradientReducer::clear() {
  complete_all();
  for (Unit& unit : state_) {
    unit.full = {};
    unit.passes = 0;
    unit.touched = false;
  }
}

}  // namespace muster
