// The two float8 formats (OCP 8-bit floating point, 2023) as numbers: largest magnitude and, on the
// host, conversion.
#pragma once

#include <cstdint>

#include "common/tensor.h"

namespace muster {

constexpr float kMaxE4M3 = 448.0f;
constexpr float kMaxE5M2 = 57344.0f;
// Tensors whose largest magnitude is below are taken for zeros: 448 / amax must be finite.
constexpr float kSmallestAmax = 0x1p-100f;

inline bool is_fp8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

// x rounded to nearest even; magnitudes above the largest become the largest, NaN becomes 0x7f.
uint8_t to_fp8(float x, DType format);
float from_fp8(uint8_t bits, DType format);

}  // namespace muster
