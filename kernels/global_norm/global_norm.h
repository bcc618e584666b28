// Sum of squares for the global gradient norm.
#pragma once

#include "common/tensor.h"

namespace muster {

// sum [1] float64, accumulates Σ x². x [n] float32. Blocks of fixed size are summed in a fixed
// order, so the result is a function of x alone.
void sum_of_squares(const Stream& stream, TensorView sum, ConstTensorView x);

}  // namespace muster
