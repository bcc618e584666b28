// First values of parameters.
#pragma once

#include <cstdint>

#include "common/tensor.h"

namespace muster {

// out[i] = std · CounterRng(seed, RandomPurpose::kInit, stream_key).normal(first + i), computed in
// double: a function of the element's index, whoever owns it. out [n] float32, contiguous. GPUs
// agree with the CPU to a unit in the last place of a float.
void fill_normal(const Stream& stream, TensorView out, uint64_t seed, uint64_t stream_key,
                 int64_t first, double std);

// out[i] = value. out float32, contiguous.
void fill_value(const Stream& stream, TensorView out, float value);

}  // namespace muster
