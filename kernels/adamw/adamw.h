// AdamW (Loshchilov and Hutter, 2019) over a flat shard.
#pragma once

#include <cstdint>
#include <span>

#include "common/tensor.h"

namespace muster {

struct AdamwOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  uint64_t rounding_seed = 0;  // of the stochastic rounding of bfloat16 moments
};
// Elements [begin, end) of the shard share a weight decay. Segments come in ascending order and do
// not overlap.
struct AdamwSegment {
  int64_t begin = 0;
  int64_t end = 0;
  float weight_decay = 0.0f;
  // Index of the first element for the stochastic rounding, which is a function of (seed, number of
  // the update, index): the same whoever owns the element.
  int64_t first_index = 0;
};

// Unless control says that the step is skipped (then nothing changes):
// g = grad · control.grad_scale; m = β1 m + (1 − β1) g; v = β2 v + (1 − β2) g²;
// weight −= lr · (m̂ / (√v̂ + eps) + weight_decay · weight); low = weight, rounded to nearest even.
// weight, grad [n] float32; m, v [n] float32, or both bfloat16 (rounded stochastically; CUDA only);
// low [n] bfloat16 or undefined; all but grad updated in place; elements outside every segment
// stay. control: StepControl, after decide_step.
void adamw_step(const Stream& stream, TensorView weight, TensorView m, TensorView v, TensorView low,
                ConstTensorView grad, ConstTensorView control,
                std::span<const AdamwSegment> segments, const AdamwOptions& options);

}  // namespace muster
