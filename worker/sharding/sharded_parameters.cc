#include "worker/sharding/sharded_parameters.h"

#include <cmath>
#include <utility>

#include "kernels/adamw/adamw.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/global_norm/global_norm.h"
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

std::vector<TensorView> views(const std::vector<Tensor>& tensors) {
  return {tensors.begin(), tensors.end()};
}

}  // namespace

struct ShardedParameters::Impl {
  Impl(std::vector<UnitSpec> specs, Communicator& comm, ShardMode shard_mode,
       int64_t prefetch_units, const ComputeContext& compute)
      : communicator(comm),
        // A single rank owns everything: all modes are the one that moves nothing.
        mode(comm.world_size() == 1 ? ShardMode::kNone : shard_mode),
        context(compute),
        units(flatten(std::move(specs), comm)),
        weight(allocate()),
        m(allocate()),
        v(allocate()),
        gatherer(units, views(weight), comm,
                 {.whole_masters = whole(),
                  .free_after_use = mode == ShardMode::kFull,
                  .prefetch_units = prefetch_units},
                 compute),
        reducer(units, comm, mode, compute) {}

  // Masters, moments and gradients are [padded] here, else [shard].
  bool whole() const { return mode == ShardMode::kNone; }

  // Zero, so that padding stays zero for good.
  std::vector<Tensor> allocate() const {
    std::vector<Tensor> tensors;
    for (const FlatUnit& unit : units) {
      tensors.emplace_back(Shape{whole() ? unit.padded : unit.shard}, DType::kFloat32,
                           *context.allocator);
      fill_zero(context.stream, tensors.back());
    }
    return tensors;
  }

  // The elements that this rank updates, and where they begin in its buffers.
  Range updated(const FlatUnit& unit) const { return whole() ? Range{0, unit.numel} : unit.owned; }

  // This rank's owned elements, without padding, of one of its buffers.
  TensorView owned(size_t unit, TensorView buffer) const {
    const FlatUnit& flat = units[unit];
    const int64_t begin = whole() ? flat.owned.begin : 0;
    return buffer.slice(begin, begin + flat.owned.size());
  }

  // Σ g² over all ranks, the same bits on each.
  double squared_norm() const {
    const Tensor sum({1}, DType::kFloat64, *context.allocator);
    fill_zero(context.stream, sum);
    for (size_t i = 0; i < units.size(); ++i) {
      sum_of_squares(context.stream, sum, owned(i, reducer.reduced(static_cast<int>(i))));
    }
    communicator.all_reduce(sum)->wait(context.stream);
    return *sum.data<double>();
  }

  void step(const AdamwOptions& options, double weight_decay) {
    for (size_t i = 0; i < units.size(); ++i) {
      const Range range = updated(units[i]);
      const auto part = [&](TensorView buffer) { return buffer.slice(0, range.size()); };
      adamw_step(context.stream, part(weight[i]), part(m[i]), part(v[i]),
                 part(reducer.reduced(static_cast<int>(i))), units[i].segments(range, weight_decay),
                 options);
    }
    gatherer.invalidate();
  }

  Communicator& communicator;
  const ShardMode mode;
  const ComputeContext context;
  const std::vector<FlatUnit> units;
  std::vector<Tensor> weight;
  std::vector<Tensor> m;
  std::vector<Tensor> v;
  WeightGatherer gatherer;
  GradientReducer reducer;
};

ShardedParameters::ShardedParameters(std::vector<UnitSpec> units, Communicator& communicator,
                                     const std::string& mode, int64_t prefetch_units,
                                     const ComputeContext& context)
    : impl_(std::make_unique<Impl>(std::move(units), communicator, parse_shard_mode(mode),
                                   prefetch_units, context)) {}
ShardedParameters::~ShardedParameters() = default;

void ShardedParameters::initialise(uint64_t seed) {
  for (size_t i = 0; i < impl_->units.size(); ++i) {
    const FlatUnit& unit = impl_->units[i];
    const Range range = impl_->updated(unit);
    float* weight = impl_->weight[i].data<float>();
    int64_t offset = 0;
    for (const ParameterSpec& parameter : unit.spec.parameters) {
      const int64_t begin = std::max(offset, range.begin);
      const int64_t end = std::min(offset + parameter.shape.numel(), range.end);
#pragma omp parallel for
      for (int64_t at = begin; at < end; ++at) {
        weight[at - range.begin] = initial_value(seed, parameter, at - offset);
      }
      offset += parameter.shape.numel();
    }
    fill_zero(impl_->context.stream, impl_->m[i]);
    fill_zero(impl_->context.stream, impl_->v[i]);
  }
  impl_->gatherer.invalidate();
}

std::vector<ShardState> ShardedParameters::state() {
  std::vector<ShardState> state;
  for (size_t i = 0; i < impl_->units.size(); ++i) {
    state.push_back({static_cast<int>(i), impl_->units[i].owned, impl_->owned(i, impl_->weight[i]),
                     impl_->owned(i, impl_->m[i]), impl_->owned(i, impl_->v[i])});
  }
  return state;
}

void ShardedParameters::weights_changed() {
  impl_->gatherer.invalidate();
  if (!impl_->whole()) return;
  for (size_t i = 0; i < impl_->units.size(); ++i) {
    for (const Tensor& buffer : {impl_->weight[i], impl_->m[i], impl_->v[i]}) {
      impl_->communicator.all_gather(buffer, impl_->units[i].own_part(buffer))
          ->wait(impl_->context.stream);
    }
  }
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
  return impl_->units[unit].parameters(impl_->reducer.gradients(unit));
}

void ShardedParameters::gradients_done(int unit) {
  impl_->reducer.gradients_done(unit);
}

void ShardedParameters::begin_step(int64_t passes) {
  impl_->reducer.begin_step(passes);
}

UpdateResult ShardedParameters::update(const OptimizerConfig& optimizer, double lr,
                                       int64_t update_number, double grad_scale, bool apply) {
  impl_->reducer.finish();
  UpdateResult result;
  result.grad_norm = std::sqrt(impl_->squared_norm()) * grad_scale;
  result.skipped = !apply || !std::isfinite(result.grad_norm);
  if (!result.skipped) {
    const bool clip = optimizer.clip_norm > 0 && result.grad_norm > optimizer.clip_norm;
    impl_->step(
        {.lr = lr,
         .beta1 = optimizer.beta1,
         .beta2 = optimizer.beta2,
         .eps = optimizer.eps,
         .step = update_number,
         .grad_scale = clip ? grad_scale * optimizer.clip_norm / result.grad_norm : grad_scale},
        optimizer.weight_decay);
  }
  impl_->reducer.clear();
  return result;
}

}  // namespace muster
