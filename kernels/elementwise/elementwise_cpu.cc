#include <immintrin.h>

#include <cstring>

#include "kernels/blocks.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/narrow_floats.h"

namespace muster::cpu {
namespace {

template <typename To, typename From>
void convert(To* to, const From* from, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = from_float<To>(to_float(from[i]));
}

// float16 has conversion instructions; a tail goes through a buffer of one vector.
void convert(Float16* to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; i += 8) {
    const int64_t count = std::min<int64_t>(8, n - i);
    float in[8] = {};
    std::memcpy(in, from + i, count * sizeof(float));
    const __m128i half =
        _mm256_cvtps_ph(_mm256_loadu_ps(in), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(to + i, &half, count * sizeof(Float16));
  }
}
void convert(float* to, const Float16* from, int64_t n) {
  for (int64_t i = 0; i < n; i += 8) {
    const int64_t count = std::min<int64_t>(8, n - i);
    __m128i half = _mm_setzero_si128();
    std::memcpy(&half, from + i, count * sizeof(Float16));
    const __m256 out = _mm256_cvtph_ps(half);
    std::memcpy(to + i, &out, count * sizeof(float));
  }
}
// Between the two 16-bit formats by way of float32, which holds either exactly: one rounding.
template <typename To, typename From>
void convert_via_float(To* to, const From* from, int64_t n) {
  constexpr int64_t kChunk = 256;
  float buffer[kChunk];
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t count = std::min(kChunk, n - i);
    convert(buffer, from + i, count);
    convert(to + i, buffer, count);
  }
}
void convert(Float16* to, const BFloat16* from, int64_t n) {
  convert_via_float(to, from, n);
}
void convert(BFloat16* to, const Float16* from, int64_t n) {
  convert_via_float(to, from, n);
}

template <typename To, typename From>
void convert_all(const TensorView& out, const ConstTensorView& x) {
  To* to = static_cast<To*>(out.raw());
  const From* from = static_cast<const From*>(x.raw());
  for_blocks(x.numel(),
             [=](int64_t begin, int64_t end) { convert(to + begin, from + begin, end - begin); });
}

template <typename To>
void convert_to(const TensorView& out, const ConstTensorView& x) {
  if constexpr (!std::is_same_v<To, float>) {
    if (x.dtype() == DType::kFloat32) return convert_all<To, float>(out, x);
  }
  if constexpr (!std::is_same_v<To, BFloat16>) {
    if (x.dtype() == DType::kBFloat16) return convert_all<To, BFloat16>(out, x);
  }
  if constexpr (!std::is_same_v<To, Float16>) {
    if (x.dtype() == DType::kFloat16) return convert_all<To, Float16>(out, x);
  }
}

}  // namespace

void fill_zero(const Stream&, TensorView out) {
  char* to = static_cast<char*>(out.raw());
  for_blocks(static_cast<int64_t>(out.bytes()),
             [=](int64_t begin, int64_t end) { std::memset(to + begin, 0, end - begin); });
}

void copy_cast(const Stream&, TensorView out, ConstTensorView x) {
  if (out.dtype() == x.dtype()) {
    char* to = static_cast<char*>(out.raw());
    const char* from = static_cast<const char*>(x.raw());
    return for_blocks(static_cast<int64_t>(x.bytes()), [=](int64_t begin, int64_t end) {
      std::memcpy(to + begin, from + begin, end - begin);
    });
  }
  if (out.dtype() == DType::kFloat32) return convert_to<float>(out, x);
  if (out.dtype() == DType::kBFloat16) return convert_to<BFloat16>(out, x);
  convert_to<Float16>(out, x);
}

void add(const Stream&, TensorView out, ConstTensorView a, ConstTensorView b) {
  float* to = out.data<float>();
  const float* x = a.data<float>();
  const float* y = b.data<float>();
  for_blocks(out.numel(), [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) to[i] = x[i] + y[i];
  });
}

}  // namespace muster::cpu
