// AdamW (Loshchilov and Hutter, 2019) over a flat shard.
#pragma once

#include <span>

#include "common/tensor.h"

namespace muster {

struct AdamwOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  int64_t step = 1;  // of this update, from 1: bias correction
  double grad_scale =
      1.0;  // multiplies every gradient first (1 / tokens, times the clipping factor)
};
// Elements [begin, end) of the shard share a weight decay. Segments come in ascending order and do
// not overlap.
struct AdamwSegment {
  int64_t begin = 0;
  int64_t end = 0;
  float weight_decay = 0.0f;
};

// g = grad · grad_scale; m = β1 m + (1 − β1) g; v = β2 v + (1 − β2) g²;
// weight −= lr · (m̂ / (√v̂ + eps) + weight_decay · weight). All [n] float32, updated in place;
// elements outside every segment stay.
void adamw_step(const Stream& stream, TensorView weight, TensorView m, TensorView v,
                ConstTensorView grad, std::span<const AdamwSegment> segments,
                const AdamwOptions& options);

}  // namespace muster
