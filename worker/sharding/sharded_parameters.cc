#include "worker/sharding/sharded_parameters.h"

#include <algorithm>
#include <utility>

#include "kernels/adamw/adamw.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/global_norm/global_norm.h"
#include "kernels/runtime/profiler_range.h"
#include "worker/sharding/gradient_reducer.h"
#include "worker/sharding/weight_gatherer.h"

namespace muster {
namespace {

std::vector<FlatUnit> flatten(std::vector<UnitSpec> units, const Placement& placement) {
  std::vector<FlatUnit> flat;
  flat.reserve(units.size());
  for (UnitSpec& unit : units) flat.emplace_back(std::move(unit), placement);
  return flat;
}

}  // namespace

struct ShardedParameters::Impl {
  Impl(std::vector<UnitSpec> specs, const Groups& communicators, const ShardingOptions& options,
       const ComputeContext& compute)
      : groups(communicators),
        // A single rank owns everything: all modes are the one that moves nothing.
        mode(groups.shard.world_size() == 1 ? ShardMode::kNone : parse_shard_mode(options.mode)),
        placement{.world_size = groups.world.world_size(),
                  .rank = groups.world.rank(),
                  .shard_group = whole() ? 1 : groups.shard.world_size()},
        context(compute),
        units(flatten(std::move(specs), placement)),
        weight(allocate(DType::kFloat32, context.for_state())),
        m(allocate(options.moments_dtype, context.for_state())),
        v(allocate(options.moments_dtype, context.for_state())),
        low(keeps_low() ? allocate(context.dtype, *context.allocator) : Tensor()),
        gatherer(units, shards(keeps_low() ? low : weight), groups.shard,
                 {.whole = whole(),
                  .free_after_use = mode == ShardMode::kFull,
                  .prefetch_units = options.prefetch_units},
                 compute),
        reducer(units, groups, mode, options.reduce_dtype, compute) {}

  // A rank's shard is everything.
  bool whole() const { return mode == ShardMode::kNone; }
  bool keeps_low() const { return whole() && context.dtype != DType::kFloat32; }

  // Zero, so that padding stays zero for good.
  Tensor allocate(DType dtype, Allocator& allocator) const {
    int64_t total = 0;
    for (const FlatUnit& unit : units) total += unit.room;
    Tensor tensor({total}, dtype, allocator);
    fill_zero(context.stream, tensor);
    return tensor;
  }

  // One view a unit, [shard], of a buffer with all units one behind the other.
  std::vector<TensorView> shards(TensorView buffer) const {
    std::vector<TensorView> shards;
    int64_t at = 0;
    for (const FlatUnit& unit : units) {
      shards.push_back(buffer.slice(at, at + unit.shard));
      at += unit.room;
    }
    return shards;
  }

  // Of a unit's shard, the elements that this rank saves.
  static TensorView saved(const FlatUnit& unit, TensorView shard) {
    const int64_t begin = unit.saved.begin - unit.owned.begin;
    return shard.slice(begin, begin + unit.saved.size());
  }

  // Of all units, for one update of the whole buffers.
  std::vector<AdamwSegment> segments(double weight_decay) const {
    std::vector<AdamwSegment> all;
    int64_t at = 0;           // of the unit in the buffers
    int64_t first_index = 0;  // of the unit in the model
    for (const FlatUnit& unit : units) {
      for (AdamwSegment segment : unit.segments(unit.owned, weight_decay)) {
        segment.first_index = first_index + unit.owned.begin + segment.begin;
        segment.begin += at;
        segment.end += at;
        all.push_back(segment);
      }
      at += unit.room;
      first_index += unit.numel;
    }
    return all;
  }

  void weights_changed() {
    if (keeps_low()) copy_cast(context.stream, low, weight);
    gatherer.invalidate();
  }

  const Groups groups;
  const ShardMode mode;
  const Placement placement;
  const ComputeContext context;
  const std::vector<FlatUnit> units;
  // All units one behind the other, each [shard] in [room].
  Tensor weight;
  Tensor m;
  Tensor v;
  Tensor low;  // the weights in the compute dtype, if keeps_low()
  WeightGatherer gatherer;
  GradientReducer reducer;
};

ShardedParameters::ShardedParameters(std::vector<UnitSpec> units, const Groups& groups,
                                     const ShardingOptions& options, const ComputeContext& context)
    : impl_(std::make_unique<Impl>(std::move(units), groups, options, context)) {}
ShardedParameters::~ShardedParameters() = default;

void ShardedParameters::initialise(uint64_t seed) {
  const std::vector<TensorView> weights = impl_->shards(impl_->weight);
  for (size_t i = 0; i < impl_->units.size(); ++i) {
    const FlatUnit& unit = impl_->units[i];
    const Range range = unit.owned;
    int64_t offset = 0;
    for (const ParameterSpec& parameter : unit.spec.parameters) {
      const int64_t begin = std::max(offset, range.begin);
      const int64_t end = std::min(offset + parameter.shape.numel(), range.end);
      if (begin < end) {
        fill_initial(impl_->context.stream,
                     weights[i].slice(begin - range.begin, end - range.begin), seed, parameter,
                     begin - offset);
      }
      offset += parameter.shape.numel();
    }
  }
  fill_zero(impl_->context.stream, impl_->m);
  fill_zero(impl_->context.stream, impl_->v);
  impl_->weights_changed();
}

std::vector<ShardState> ShardedParameters::state() {
  std::vector<ShardState> state;
  const auto weight = impl_->shards(impl_->weight);
  const auto m = impl_->shards(impl_->m);
  const auto v = impl_->shards(impl_->v);
  for (size_t i = 0; i < impl_->units.size(); ++i) {
    const FlatUnit& unit = impl_->units[i];
    state.push_back({static_cast<int>(i), unit.saved, Impl::saved(unit, weight[i]),
                     Impl::saved(unit, m[i]), Impl::saved(unit, v[i])});
  }
  return state;
}

std::vector<Tensor> ShardedParameters::state_memory() const {
  return {impl_->weight, impl_->m, impl_->v};
}

int ShardedParameters::part() const {
  return impl_->placement.part();
}

void ShardedParameters::weights_changed() {
  Communicator* const replicas = impl_->whole() ? &impl_->groups.world : impl_->groups.replicas;
  if (replicas != nullptr) {
    // The parts of a shard lie in it in the order of the replicas that hold them.
    const int64_t replica = impl_->placement.replica();
    for (const Tensor& buffer : {impl_->weight, impl_->m, impl_->v}) {
      const std::vector<TensorView> shards = impl_->shards(buffer);
      for (size_t i = 0; i < shards.size(); ++i) {
        const int64_t part = impl_->units[i].part;
        replicas->all_gather(shards[i], shards[i].slice(replica * part, (replica + 1) * part))
            ->wait(impl_->context.stream);
      }
    }
  }
  impl_->weights_changed();
}

void ShardedParameters::begin_pass(std::vector<int> use_order) {
  impl_->gatherer.begin_pass(std::move(use_order));
}

UnitWeights ShardedParameters::use(int unit) {
  const std::vector<TensorView> weights = impl_->units[unit].parameters(impl_->gatherer.use(unit));
  return {weights.begin(), weights.end()};
}

void ShardedParameters::release(int unit) {
  impl_->gatherer.release(unit);
}

UnitGradients ShardedParameters::gradients(int unit) {
  return impl_->reducer.gradients(unit);
}

void ShardedParameters::gradients_done(int unit) {
  impl_->reducer.gradients_done(unit);
}

void ShardedParameters::begin_step(int64_t passes) {
  impl_->reducer.begin_step(passes);
}

void ShardedParameters::update(const OptimizerConfig& optimizer, const StepRules& rules,
                               uint64_t rounding_seed, TensorView sums, TensorView control) {
  const ProfilerRange shown("update");
  Impl& m = *impl_;
  const Stream& stream = m.context.stream;
  m.reducer.finish();
  const TensorView gradients = m.reducer.reduced();
  fill_zero(stream, sums.slice(0, 1));
  // The replicas have the same gradients: the first one's norm is everybody's, in the same bits.
  if (m.placement.replica() == 0) sum_of_squares(stream, sums.slice(0, 1), gradients);
  m.groups.world.all_reduce(sums)->wait(stream);
  decide_step(stream, control, sums, rules);
  adamw_step(stream, m.weight, m.m, m.v, m.low, gradients, control,
             m.segments(optimizer.weight_decay),
             {.lr = rules.lr,
              .beta1 = optimizer.beta1,
              .beta2 = optimizer.beta2,
              .eps = optimizer.eps,
              .rounding_seed = rounding_seed});
  m.gatherer.invalidate();
  m.reducer.clear();
}

}  // namespace muster
