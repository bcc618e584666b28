// Quantisation is two passes over x: its largest magnitude, then rounding with the transposition.
// The second goes from x's end to its beginning, because that is what the first has left in the L2
// cache.
#include <cuda_fp8.h>

#include <algorithm>

#include "kernels/cuda/device.h"
#include "kernels/cuda/vec.cuh"
#include "kernels/fp8/format.h"
#include "kernels/fp8/fp8.h"
#include "kernels/fp8/fp8_cuda.h"
#include "kernels/matmul/product_cuda.h"

namespace muster::cuda {
namespace {

constexpr int kAmaxThreads = 1024;
constexpr int kMaxParts = 1024;
constexpr int kThreads = 256;
constexpr int kTile = 128;  // rows and columns of x a block of the second pass

// Rows of packs; a contiguous matrix is one row.
struct PackRows {
  uint32_t packs;    // in all
  uint32_t per_row;  // at least 1
  int64_t stride;    // elements from row to row
};

template <typename T, int W>
__device__ float pack_amax(const Raw<T, W>& raw) {
  const auto pack = raw.unpack();
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < W; ++i) amax = fmaxf(amax, fabsf(pack.x[i]));
  return amax;
}

// partial[block] = largest magnitude that the block has seen.
template <typename T>
__global__ void __launch_bounds__(kAmaxThreads, 2)
    amax_kernel(float* partial, const T* x, PackRows rows) {
  constexpr int W = 16 / sizeof(T);
  constexpr int kUnroll = 4;
  __shared__ float scratch[32];
  float amax = 0.0f;
  const uint32_t step = gridDim.x * kAmaxThreads;
  const auto load = [&](uint32_t p) {
    const uint32_t row = p / rows.per_row;
    return Raw<T, W>::load(x + row * rows.stride +
                           static_cast<int64_t>(p - row * rows.per_row) * W);
  };
  uint32_t p = blockIdx.x * kAmaxThreads + threadIdx.x;
  for (; p + (kUnroll - 1) * step < rows.packs; p += kUnroll * step) {
    Raw<T, W> raw[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) raw[u] = load(p + u * step);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) amax = fmaxf(amax, pack_amax(raw[u]));
  }
  for (; p < rows.packs; p += step) amax = fmaxf(amax, pack_amax(load(p)));
  amax = block_max(amax, scratch);
  if (threadIdx.x == 0) partial[blockIdx.x] = amax;
}

// Four numbers to the four bytes of a word.
template <__nv_fp8_interpretation_t kFormat>
__device__ uint32_t round_4(const float* x, float factor) {
  const auto pair = [&](int i) {
    return static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(
        make_float2(x[i] * factor, x[i + 1] * factor), __NV_SATFINITE, kFormat));
  };
  return pair(0) | pair(2) << 16;
}

// 16 numbers to 16 bytes.
template <typename T, __nv_fp8_interpretation_t kFormat>
__device__ void round_16(uint32_t (&out)[4], Raw<T, 16 / sizeof(T)> (&raw)[sizeof(T)],
                         float factor) {
  constexpr int W = 16 / sizeof(T);
#pragma unroll
  for (int a = 0; a < static_cast<int>(sizeof(T)); ++a) {
    const auto pack = raw[a].unpack_here();
#pragma unroll
    for (int i = 0; i < W; i += 4) out[(a * W + i) / 4] = round_4<kFormat>(pack.x + i, factor);
  }
}

// Byte j of each of four words becomes word j.
__device__ void transpose_4x4(uint32_t (&w)[4]) {
  const uint32_t low01 = __byte_perm(w[0], w[1], 0x5140);
  const uint32_t low23 = __byte_perm(w[2], w[3], 0x5140);
  const uint32_t high01 = __byte_perm(w[0], w[1], 0x7362);
  const uint32_t high23 = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(low01, low23, 0x5410);
  w[1] = __byte_perm(low01, low23, 0x7632);
  w[2] = __byte_perm(high01, high23, 0x5410);
  w[3] = __byte_perm(high01, high23, 0x7632);
}

// A tile of kTile by kTile a block. A thread rounds 4 rows of 16 columns and turns them into 16
// columns of 4 rows, which it leaves in shared memory as words; word w of column c lies at
// w ^ 4 · (c / 16), so that neither side has bank conflicts.
template <typename T, __nv_fp8_interpretation_t kFormat>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 4 : 2)
    round_kernel(uint8_t* data, uint8_t* transposed, float* scale, const T* x, int64_t stride,
                 int rows, int columns, int column_tiles, const float* partial, int parts) {
  __shared__ float scratch[32];
  __shared__ uint4 tile[kTile * kTile / 16];
  const auto block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const int first_row = block / column_tiles * kTile;
  const int first_column = block % column_tiles * kTile;
  const int group = static_cast<int>(threadIdx.x) % 8;  // of 16 columns
  const int quad = static_cast<int>(threadIdx.x) / 8;   // of 4 rows
  const int row = first_row + quad * 4;
  const int column = first_column + group * 16;
  const bool inside = row < rows && column < columns;
  constexpr int W = 16 / sizeof(T);
  Raw<T, W> raw[4][sizeof(T)] = {};
  if (inside) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const T* from = x + (row + r) * stride + column;
#pragma unroll
      for (int a = 0; a < static_cast<int>(sizeof(T)); ++a) {
        raw[r][a] = Raw<T, W>::load(from + a * W);
      }
    }
  }
  // The loads above travel meanwhile.
  float amax = 0.0f;
  for (int i = threadIdx.x; i < parts; i += kThreads) amax = fmaxf(amax, partial[i]);
  amax = block_max(amax, scratch);
  constexpr float kLargest = kFormat == __NV_E4M3 ? kMaxE4M3 : kMaxE5M2;
  const float factor = amax < kSmallestAmax ? 0.0f : kLargest / amax;
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale = amax / kLargest;

  uint32_t rounded[4][4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    round_16<T, kFormat>(rounded[r], raw[r], factor);
    if (inside && data != nullptr) {
      *reinterpret_cast<uint4*>(data + static_cast<int64_t>(row + r) * columns + column) =
          make_uint4(rounded[r][0], rounded[r][1], rounded[r][2], rounded[r][3]);
    }
  }
  if (transposed == nullptr) return;
  auto* words = reinterpret_cast<uint32_t*>(tile);
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    uint32_t square[4] = {rounded[0][part], rounded[1][part], rounded[2][part], rounded[3][part]};
    transpose_4x4(square);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      words[(group * 16 + part * 4 + c) * (kTile / 4) + (quad ^ (4 * group))] = square[c];
    }
  }
  __syncthreads();
  const int chunk = static_cast<int>(threadIdx.x) % 8;  // of 16 rows
#pragma unroll
  for (int pass = 0; pass < kTile * 8 / kThreads; ++pass) {
    const int c = static_cast<int>(threadIdx.x) / 8 + pass * (kThreads / 8);
    if (first_column + c >= columns || first_row + chunk * 16 >= rows) continue;
    *reinterpret_cast<uint4*>(transposed + static_cast<int64_t>(first_column + c) * rows +
                              first_row + chunk * 16) = tile[c * 8 + (chunk ^ (c / 16))];
  }
}

template <typename T>
void quantise(const Stream& stream, const TensorView& data, const TensorView& transposed,
              const TensorView& scale, const ConstTensorView& x,
              const ConstTensorView& known_amax) {
  constexpr int W = 16 / sizeof(T);
  const int64_t rows = x.size(0);
  const int64_t columns = x.size(1);
  const int64_t packs = x.numel() / W;
  MUSTER_CHECK(rows_aligned(x) && packs < (int64_t{1} << 31), x.shape().to_string());
  const PackRows pack_rows{.packs = static_cast<uint32_t>(packs),
                           .per_row = static_cast<uint32_t>(x.contiguous() ? packs : columns / W),
                           .stride = x.stride(0)};
  const auto* from = static_cast<const T*>(x.raw());
  const float* amax = nullptr;
  int parts = 1;
  if (known_amax.defined()) {
    amax = known_amax.data<float>();
  } else {
    parts = static_cast<int>(
        std::min<int64_t>({2 * multiprocessors(), kMaxParts, ceil_div(packs, kAmaxThreads)}));
    auto* partial = static_cast<float*>(workspace(stream, Scratch::kOp, kMaxParts * sizeof(float)));
    amax_kernel<<<parts, kAmaxThreads, 0, handle_of(stream)>>>(partial, from, pack_rows);
    CUDA_CHECK(cudaGetLastError());
    amax = partial;
  }
  const auto column_tiles = static_cast<int>(ceil_div(columns, kTile));
  const auto tiles = static_cast<unsigned>(ceil_div(rows, kTile) * column_tiles);
  const DType format = data.defined() ? data.dtype() : transposed.dtype();
  const auto kernel =
      format == DType::kFloat8E4M3 ? round_kernel<T, __NV_E4M3> : round_kernel<T, __NV_E5M2>;
  kernel<<<tiles, kThreads, 0, handle_of(stream)>>>(
      static_cast<uint8_t*>(data.raw()), static_cast<uint8_t*>(transposed.raw()),
      scale.data<float>(), from, x.stride(0), static_cast<int>(rows), static_cast<int>(columns),
      column_tiles, amax, parts);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

bool fp8_supported(int device) {
  int major = 0;
  int minor = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return major * 10 + minor >= 89;
}

void fp8_quantise(const Stream& stream, TensorView data, TensorView transposed, TensorView scale,
                  ConstTensorView x, ConstTensorView amax) {
  with_activation(x.dtype(), [&](auto* type) {
    quantise<std::remove_pointer_t<decltype(type)>>(stream, data, transposed, scale, x, amax);
  });
}

void fp8_matmul(const Stream& stream, TensorView out, Fp8View a, Fp8View b,
                const Fp8MatmulOptions& options) {
  const Product product{.out = out,
                        .a = a.data,
                        .b = b.data,
                        .transpose_b = true,
                        .addend = options.addend,
                        .bias = options.bias.raw(),
                        .scale_a = a.scale.data<float>(),
                        .scale_b = b.scale.data<float>(),
                        .fast_accumulate = !options.exact_sums};
  if (!multiply(stream, product)) {
    throw Error("this GPU or its cuBLASLt has no float8 product " + out.shape().to_string() +
                " = " + a.data.shape().to_string() + " · " + b.data.shape().to_string() + "ᵀ");
  }
}

}  // namespace muster::cuda
