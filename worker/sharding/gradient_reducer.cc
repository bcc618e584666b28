#include "worker/sharding/gradient_reducer.h"

#include <utility>

#include "kernels/elementwise/elementwise.h"

namespace muster {
namespace {

// Full gradient buffers that may wait for the network; more would cost memory and hide nothing.
constexpr size_t kMostUnderWay = 2;

}  // namespace

GradientReducer::GradientReducer(const std::vector<FlatUnit>& units, Communicator& communicator,
                                 ShardMode mode, const ComputeContext& context)
    : units_(units),
      communicator_(communicator),
      mode_(mode),
      context_(context),
      state_(units.size()) {}

void GradientReducer::begin_step(int64_t passes) {
  MUSTER_CHECK(passes > 0);
  passes_ = passes;
}

TensorView GradientReducer::gradients(int unit) {
  Unit& state = state_[unit];
  if (!state.full.defined()) {
    state.full = Tensor({units_[unit].padded}, DType::kFloat32, *context_.allocator);
    fill_zero(context_.stream, state.full);
  }
  return state.full;
}

void GradientReducer::gradients_done(int unit) {
  Unit& state = state_[unit];
  const FlatUnit& flat = units_[unit];
  ++state.passes;
  MUSTER_CHECK(state.passes <= passes_, flat.spec.name + ": more passes than announced");
  if (!every_pass() && state.passes < passes_) return;
  const TensorView full = gradients(unit);
  if (mode_ == ShardMode::kNone) {
    under_way_.push_back({unit, state.full, communicator_.all_reduce(full)});
    return;
  }
  auto work = communicator_.reduce_scatter(flat.own_part(full), full);
  under_way_.push_back({unit, state.full, std::move(work)});
  if (!every_pass()) return;
  state.full = {};
  while (under_way_.size() > kMostUnderWay) complete_oldest();
}

// Oldest first, so that a unit's passes are added in their order.
void GradientReducer::complete_oldest() {
  const Reduction reduction = std::move(under_way_.front());
  under_way_.pop_front();
  reduction.work->wait(context_.stream);
  if (!every_pass()) return;
  const TensorView own = units_[reduction.unit].own_part(reduction.full);
  Tensor& shard = state_[reduction.unit].shard;
  if (shard.defined()) {
    add(context_.stream, shard, shard, own);
  } else {
    shard = Tensor(own.shape(), DType::kFloat32, *context_.allocator);
    copy_cast(context_.stream, shard, own);
  }
}

void GradientReducer::finish() {
  while (!under_way_.empty()) complete_oldest();
  for (size_t i = 0; i < state_.size(); ++i) {
    MUSTER_CHECK(state_[i].passes == passes_,
                 units_[i].spec.name + ": fewer passes than announced");
  }
}

TensorView GradientReducer::reduced(int unit) const {
  const Unit& state = state_[unit];
  if (every_pass()) return state.shard;
  if (mode_ == ShardMode::kNone) return state.full;
  return units_[unit].own_part(state.full);
}

void GradientReducer::clear() {
  while (!under_way_.empty()) complete_oldest();
  for (Unit& unit : state_) unit = {};
}

}  // namespace muster
