// bfloat16 and float16 on the CPU: how they are stored, and conversions to and from float, rounded
// to nearest even.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>
#include <type_traits>

#include "kernels/vector_math.h"

namespace muster::cpu {

// The 16-bit formats as the numbers that they are stored as.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

MUSTER_INLINE float to_float(float x) {
  return x;
}
MUSTER_INLINE float to_float(BFloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}
MUSTER_INLINE float to_float(Float16 x) {
  return _cvtsh_ss(x.bits);
}

template <typename T>
MUSTER_INLINE T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    // Half a unit in the last place, less one where the kept part is even: ties go to even.
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    // Rounding a NaN could carry into infinity; its quiet bit keeps it a NaN.
    const uint32_t nan = (bits >> 16) | 0x40;
    return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded)};
  } else {
    return {static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
  }
}

}  // namespace muster::cpu
