// Sums of columns in a fixed order, for gradients of biases and of norm weights.
#pragma once

#include "common/tensor.h"

namespace muster::cuda {

// out[c] += Σ_r x[r, c] for c < split, rest[c − split] += Σ_r x[r, c] for the columns after (none
// without `rest`). out and rest float32; x [R, C] float32 or bfloat16, the row stride may exceed C.
void add_column_sums(const Stream& stream, float* out, ConstTensorView x, float* rest = nullptr,
                     int64_t split = 0);

}  // namespace muster::cuda
