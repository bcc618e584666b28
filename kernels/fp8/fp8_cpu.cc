// An emulation, slow and obvious, which says what the GPU has to compute.
#include <cmath>

#include "kernels/fp8/format.h"
#include "kernels/fp8/fp8.h"
#include "kernels/matmul/matmul.h"

namespace muster::cpu {
namespace {

Tensor decode(const Fp8View& from) {
  Tensor out({from.data.size(0), from.data.size(1)}, DType::kFloat32);
  const auto* bits = static_cast<const uint8_t*>(from.data.raw());
  for (int64_t i = 0; i < out.numel(); ++i) {
    out.data<float>()[i] = from_fp8(bits[i], from.data.dtype());
  }
  return out;
}

}  // namespace

void fp8_quantise(const Stream&, TensorView data, TensorView transposed, TensorView scale,
                  ConstTensorView x, ConstTensorView known_amax) {
  const int64_t rows = x.size(0);
  const int64_t columns = x.size(1);
  const float* from = x.data<float>();
  float amax = known_amax.defined() ? *known_amax.data<float>() : 0.0f;
  for (int64_t r = 0; r < rows && !known_amax.defined(); ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      amax = std::fmax(amax, std::abs(from[r * x.stride(0) + c]));
    }
  }
  const DType format = data.defined() ? data.dtype() : transposed.dtype();
  const float largest = format == DType::kFloat8E4M3 ? kMaxE4M3 : kMaxE5M2;
  const float factor = amax < kSmallestAmax ? 0.0f : largest / amax;
  *scale.data<float>() = amax / largest;
  auto* to = static_cast<uint8_t*>(data.raw());
  auto* to_transposed = static_cast<uint8_t*>(transposed.raw());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const uint8_t bits = to_fp8(from[r * x.stride(0) + c] * factor, format);
      if (to != nullptr) to[r * columns + c] = bits;
      if (to_transposed != nullptr) to_transposed[c * rows + r] = bits;
    }
  }
}

void fp8_matmul(const Stream& stream, TensorView out, Fp8View a, Fp8View b,
                const Fp8MatmulOptions& options) {
  const Tensor sums(out.shape(), DType::kFloat32);
  muster::matmul(stream, sums, decode(a), decode(b), {.transpose_b = true});
  const float scale = *a.scale.data<float>() * *b.scale.data<float>();
  const float* bias = options.bias.defined() ? options.bias.data<float>() : nullptr;
  const float* addend = options.addend.defined() ? options.addend.data<float>() : nullptr;
  const int64_t n = out.size(1);
  for (int64_t i = 0; i < out.size(0); ++i) {
    for (int64_t j = 0; j < n; ++j) {
      float sum = scale * sums.data<float>()[i * n + j];
      if (bias != nullptr) sum += bias[j];
      if (addend != nullptr) sum += addend[i * options.addend.stride(0) + j];
      out.data<float>()[i * out.stride(0) + j] = sum;
    }
  }
}

}  // namespace muster::cpu
