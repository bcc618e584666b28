#include "worker/sharding/weight_gatherer.h"

#include <algorithm>
#include <utility>

#include "kernels/elementwise/elementwise.h"

namespace muster {

WeightGatherer::WeightGatherer(const std::vector<FlatUnit>& units, std::vector<TensorView> weights,
                               Communicator& communicator, const Options& options,
                               const ComputeContext& context)
    : units_(units),
      weights_(std::move(weights)),
      communicator_(communicator),
      options_(options),
      context_(context),
      state_(units.size()) {}

void WeightGatherer::begin_pass(std::vector<int> use_order) {
  for (const Unit& unit : state_) MUSTER_CHECK(unit.users == 0, "the last pass has not ended");
  order_ = std::move(use_order);
  next_ = 0;
}

void WeightGatherer::start(int unit) {
  Unit& state = state_[unit];
  const FlatUnit& flat = units_[unit];
  if (state.full.defined() || options_.whole) return;
  state.full = Tensor({flat.padded}, context_.dtype, *context_.allocator);
  if (context_.dtype == DType::kFloat32) {
    state.work = communicator_.all_gather(state.full, weights_[unit]);
  } else {
    const TensorView own = flat.own_shard(state.full);
    copy_cast(context_.stream, own, weights_[unit]);
    state.work = communicator_.all_gather(state.full, own);
  }
}

// The gathers ahead are put on their way before this one is waited for, so that the network has
// work while the caller computes.
TensorView WeightGatherer::use(int unit) {
  MUSTER_CHECK(next_ < order_.size() && order_[next_] == unit,
               "unit " + units_[unit].spec.name + " is used out of the announced order");
  start(unit);
  ++next_;
  const size_t end = std::min(order_.size(), next_ + static_cast<size_t>(options_.prefetch_units));
  for (size_t i = next_; i < end; ++i) start(order_[i]);

  Unit& state = state_[unit];
  ++state.users;
  // Taken out first: a wait that throws has consumed it.
  if (const std::unique_ptr<Work> work = std::move(state.work)) work->wait(context_.stream);
  return options_.whole ? weights_[unit] : state.full.view();
}

bool WeightGatherer::soon(int unit) const {
  const auto begin = order_.begin() + static_cast<int64_t>(next_);
  const auto end = begin + std::min<int64_t>(options_.prefetch_units, order_.end() - begin);
  return std::find(begin, end, unit) != end;
}

void WeightGatherer::release(int unit) {
  Unit& state = state_[unit];
  MUSTER_CHECK(state.users > 0, units_[unit].spec.name);
  --state.users;
  if (state.users == 0 && options_.free_after_use && !soon(unit)) state.full = {};
}

void WeightGatherer::invalidate() {
  for (Unit& unit : state_) {
    MUSTER_CHECK(unit.users == 0, "weights change while they are used");
    unit.work.reset();  // waits, if nobody has; the buffer must live until then
    unit.full = {};
  }
}

}  // namespace muster
