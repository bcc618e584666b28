#include "worker/sharding/sharded_parameters.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "kernels/adamw/adamw.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/global_norm/global_norm.h"
#include "kernels/runtime/profiler_range.h"
#include "worker/sharding/gradient_reducer.h"
#include "worker/sharding/weight_gatherer.h"

namespace muster {
namespace {

std::vector<FlatUnit> flatten(std::vector<UnitSpec> units, const Communicator& communicator) {
  std::vector<FlatUnit> flat;
  flat.reserve(units.size());
  for (UnitSpec& unit : units) {
    flat.emplace_back(std::move(unit), communicator.world_size(), communicator.rank());
  }
  return flat;
}

int64_t total_of(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

}  // namespace

struct ShardedParameters::Impl {
  Impl(std::vector<UnitSpec> specs, Communicator& comm, const ShardingOptions& options,
       const ComputeContext& compute)
      : communicator(comm),
        // A single rank owns everything: all modes are the one that moves nothing.
        mode(comm.world_size() == 1 ? ShardMode::kNone : parse_shard_mode(options.mode)),
        context(compute),
        units(flatten(std::move(specs), comm)),
        weight(allocate(DType::kFloat32)),
        m(allocate(options.moments_dtype)),
        v(allocate(options.moments_dtype)),
        low(keeps_low() ? allocate(context.dtype) : Tensor()),
        gatherer(units, parts(keeps_low() ? low : weight), comm,
                 {.whole = whole(),
                  .free_after_use = mode == ShardMode::kFull,
                  .prefetch_units = options.prefetch_units},
                 compute),
        reducer(units, comm, mode, options.reduce_dtype, compute) {}

  // Masters, moments and gradients are [padded] here, else [shard].
  bool whole() const { return mode == ShardMode::kNone; }
  bool keeps_low() const { return whole() && context.dtype != DType::kFloat32; }

  // Elements of each unit in this rank's buffers, one behind the other.
  std::vector<int64_t> sizes() const {
    std::vector<int64_t> sizes;
    for (const FlatUnit& unit : units) sizes.push_back(whole() ? unit.padded : unit.shard);
    return sizes;
  }

  // Zero, so that padding stays zero for good.
  Tensor allocate(DType dtype) const {
    Tensor tensor({total_of(sizes())}, dtype, *context.allocator);
    fill_zero(context.stream, tensor);
    return tensor;
  }

  std::vector<TensorView> parts(TensorView buffer) const {
    std::vector<TensorView> parts;
    int64_t at = 0;
    for (const int64_t size : sizes()) {
      parts.push_back(buffer.slice(at, at + size));
      at += size;
    }
    return parts;
  }

  // The elements that this rank updates.
  Range updated(const FlatUnit& unit) const { return whole() ? Range{0, unit.numel} : unit.owned; }

  // This rank's owned elements, without padding, of a unit's part of one of its buffers.
  TensorView owned(size_t unit, TensorView part) const {
    const FlatUnit& flat = units[unit];
    const int64_t begin = whole() ? flat.owned.begin : 0;
    return part.slice(begin, begin + flat.owned.size());
  }

  // Of all units, for one update of the whole buffers.
  std::vector<AdamwSegment> segments(double weight_decay) const {
    std::vector<AdamwSegment> all;
    int64_t at = 0;           // of the unit in the buffers
    int64_t first_index = 0;  // of the unit in the model
    const std::vector<int64_t> size = sizes();
    for (size_t i = 0; i < units.size(); ++i) {
      for (AdamwSegment segment : units[i].segments(updated(units[i]), weight_decay)) {
        segment.first_index = first_index + updated(units[i]).begin + segment.begin;
        segment.begin += at;
        segment.end += at;
        all.push_back(segment);
      }
      at += size[i];
      first_index += units[i].numel;
    }
    return all;
  }

  void weights_changed() {
    if (keeps_low()) copy_cast(context.stream, low, weight);
    gatherer.invalidate();
  }

  Communicator& communicator;
  const ShardMode mode;
  const ComputeContext context;
  const std::vector<FlatUnit> units;
  // All units one behind the other, each [padded] or [shard].
  Tensor weight;
  Tensor m;
  Tensor v;
  Tensor low;  // the weights in the compute dtype, if keeps_low()
  WeightGatherer gatherer;
  GradientReducer reducer;
};

ShardedParameters::ShardedParameters(std::vector<UnitSpec> units, Communicator& communicator,
                                     const ShardingOptions& options, const ComputeContext& context)
    : impl_(std::make_unique<Impl>(std::move(units), communicator, options, context)) {}
ShardedParameters::~ShardedParameters() = default;

void ShardedParameters::initialise(uint64_t seed) {
  const std::vector<TensorView> weights = impl_->parts(impl_->weight);
  for (size_t i = 0; i < impl_->units.size(); ++i) {
    const FlatUnit& unit = impl_->units[i];
    const Range range = impl_->updated(unit);
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
  const auto weight = impl_->parts(impl_->weight);
  const auto m = impl_->parts(impl_->m);
  const auto v = impl_->parts(impl_->v);
  for (size_t i = 0; i < impl_->units.size(); ++i) {
    state.push_back({static_cast<int>(i), impl_->units[i].owned, impl_->owned(i, weight[i]),
                     impl_->owned(i, m[i]), impl_->owned(i, v[i])});
  }
  return state;
}

void ShardedParameters::weights_changed() {
  if (impl_->whole()) {
    for (const Tensor& buffer : {impl_->weight, impl_->m, impl_->v}) {
      const std::vector<TensorView> parts = impl_->parts(buffer);
      for (size_t i = 0; i < parts.size(); ++i) {
        impl_->communicator.all_gather(parts[i], impl_->units[i].own_part(parts[i]))
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
  sum_of_squares(stream, sums.slice(0, 1), gradients);
  // Where gradients are whole, every rank has the norm already, in the same bits.
  m.communicator.all_reduce(m.whole() ? sums.slice(1, 3) : sums)->wait(stream);
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
