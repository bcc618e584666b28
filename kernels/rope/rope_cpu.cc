#include <cmath>

#include "kernels/blocks.h"
#include "kernels/rope/rope.h"

namespace muster::cpu {

void rope_apply(const Stream&, TensorView x, ConstTensorView table, ConstTensorView positions,
                bool inverse) {
  const int64_t n = x.size(0);
  const int64_t heads = x.size(1);
  const int64_t half = x.size(2) / 2;
  const int64_t row_stride = x.stride(0);
  const int64_t head_stride = x.stride(1);
  float* data = x.data<float>();
  const float* angles = table.data<float>();
  const int32_t* position = positions.data<int32_t>();
  const float sign = inverse ? -1.0f : 1.0f;
#pragma omp parallel for schedule(static) if (x.numel() >= kParallelElements)
  for (int64_t row = 0; row < n; ++row) {
    MUSTER_CHECK(position[row] >= 0 && position[row] < table.size(0),
                 std::to_string(position[row]));
    const float* cosine = angles + position[row] * 2 * half;
    const float* sine = cosine + half;
    for (int64_t head = 0; head < heads; ++head) {
      float* first = data + row * row_stride + head * head_stride;
      float* second = first + half;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const float a = first[i];
        const float b = second[i];
        const float s = sign * sine[i];
        first[i] = std::fma(a, cosine[i], -(b * s));
        second[i] = std::fma(b, cosine[i], a * s);
      }
    }
  }
}

}  // namespace muster::cpu
