// What the layers of a model share: where they compute, and the batch of the pass under way.
#pragma once

#include "common/tensor.h"
#include "data/batch.h"

namespace muster {

struct ComputeContext {
  Stream stream;
  Allocator* allocator = &host_allocator();
  Allocator* state_allocator = nullptr;  // of what may outlive a generation; null: `allocator`
  DType dtype = DType::kFloat32;         // of weights and activations
  bool fp8 = false;           // products of the blocks' linear layers take float8 operands
  bool deterministic = true;  // a GPU gives the same bits in every run, at some cost of speed

  Allocator& for_state() const {
    return state_allocator != nullptr ? *state_allocator : *allocator;
  }
};

// One pass over a batch, forward or backward. References its arguments; lives as long as the pass.
struct Pass {
  const ComputeContext& context;
  const Batch& batch;
  ConstTensorView rope;  // rope_table(); undefined where positions are learned

  const Stream& stream() const { return context.stream; }
  // An activation in the compute dtype.
  Tensor activation(Shape shape) const { return Tensor(shape, context.dtype, *context.allocator); }
  // Statistics that are float32 whatever the compute dtype.
  Tensor statistic(Shape shape) const { return Tensor(shape, DType::kFloat32, *context.allocator); }
};

}  // namespace muster
