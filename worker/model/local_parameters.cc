#include "worker/model/local_parameters.h"

#include <cstring>
#include <utility>

namespace muster {
namespace {

// Views of each parameter in a flat unit.
std::vector<TensorView> cut(const UnitSpec& unit, TensorView flat) {
  std::vector<TensorView> views;
  views.reserve(unit.parameters.size());
  int64_t offset = 0;
  for (const ParameterSpec& spec : unit.parameters) {
    const int64_t end = offset + spec.shape.numel();
    views.push_back(flat.slice(offset, end).reshape(spec.shape));
    offset = end;
  }
  return views;
}

}  // namespace

LocalParameters::LocalParameters(std::vector<UnitSpec> units)
    : units_(std::move(units)), gradients_(units_.size()) {
  for (const UnitSpec& unit : units_) {
    weights_.push_back(Tensor::zeros({unit.numel()}, DType::kFloat32));
  }
}

void LocalParameters::initialise(uint64_t seed) {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    const std::vector<TensorView> weights = cut(units_[unit], weights_[unit]);
    for (size_t i = 0; i < weights.size(); ++i) {
      fill_initial(Stream::cpu(), weights[i].reshape({weights[i].numel()}), seed,
                   units_[unit].parameters[i], 0);
    }
  }
}

void LocalParameters::clear_gradients() {
  for (const Tensor& gradient : gradients_) {
    if (gradient.defined()) std::memset(gradient.view().raw(), 0, gradient.bytes());
  }
}

UnitWeights LocalParameters::use(int unit) {
  const std::vector<TensorView> views = cut(units_[unit], weights_[unit]);
  return {views.begin(), views.end()};
}

TensorView LocalParameters::flat_gradients(int unit) {
  Tensor& gradient = gradients_[unit];
  if (!gradient.defined()) gradient = Tensor::zeros({units_[unit].numel()}, DType::kFloat32);
  return gradient;
}

UnitGradients LocalParameters::gradients(int unit) {
  return {cut(units_[unit], flat_gradients(unit)), /*fresh=*/false};
}

}  // namespace muster
