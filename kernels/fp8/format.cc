#include "kernels/fp8/format.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace muster {
namespace {

struct Format {
  int mantissa_bits;
  int bias;  // of the exponent
  float max;
};

Format format_of(DType dtype) {
  if (dtype == DType::kFloat8E4M3) return {3, 7, kMaxE4M3};
  MUSTER_CHECK(dtype == DType::kFloat8E5M2, name_of(dtype));
  return {2, 15, kMaxE5M2};
}

constexpr uint8_t kNan = 0x7f;

}  // namespace

uint8_t to_fp8(float x, DType dtype) {
  const Format format = format_of(dtype);
  if (std::isnan(x)) return kNan;
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::min(std::abs(x), format.max);
  if (magnitude == 0.0f) return sign;
  // The grid's exponent; below the smallest normal number it stays. Rounding up to the next power
  // of two carries into the exponent's bits by itself.
  const int exponent = std::max(std::ilogb(magnitude), 1 - format.bias);
  const int steps =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent)));
  const int hidden = 1 << format.mantissa_bits;
  const int bits = steps < hidden ? steps : (exponent + format.bias) * hidden + (steps - hidden);
  return static_cast<uint8_t>(sign | bits);
}

float from_fp8(uint8_t bits, DType dtype) {
  const Format format = format_of(dtype);
  const int magnitude = bits & 0x7f;
  const bool infinite = dtype == DType::kFloat8E5M2 && magnitude == 0x7c;
  const bool nan = dtype == DType::kFloat8E5M2 ? magnitude > 0x7c : magnitude == kNan;
  if (nan) return std::numeric_limits<float>::quiet_NaN();
  const int exponent = magnitude >> format.mantissa_bits;
  const int hidden = 1 << format.mantissa_bits;
  const int mantissa = magnitude % hidden + (exponent > 0 ? hidden : 0);
  const float value = infinite
                          ? std::numeric_limits<float>::infinity()
                          : std::ldexp(static_cast<float>(mantissa),
                                       std::max(exponent, 1) - format.bias - format.mantissa_bits);
  return bits & 0x80 ? -value : value;
}

}  // namespace muster
