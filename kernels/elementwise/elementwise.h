// The plain loops: fill, copy, cast, add. Contiguous views of equal size.
#pragma once

#include "common/tensor.h"

namespace muster {

// Sets every byte to zero.
void fill_zero(const Stream& stream, TensorView out);
// out[i] = x[i], with conversion between float32, bfloat16 and float16 (round to nearest even).
void copy_cast(const Stream& stream, TensorView out, ConstTensorView x);
// out[i] = a[i] + b[i]; out may be a or b. Same dtype.
void add(const Stream& stream, TensorView out, ConstTensorView a, ConstTensorView b);

}  // namespace muster
