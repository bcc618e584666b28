#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/vec.cuh"

namespace muster::cuda {
namespace {

constexpr int kLanes = 32;             // threads that share a column
constexpr int64_t kDirectRows = 1024;  // up to here one launch does it

// Where a sum of columns goes: out before column `split`, rest from there on.
struct Target {
  float* out;
  float* rest;
  int64_t split;
};

// Block (32, kLanes): 32 packs of columns; partial[chunk, c] = the chunk's sum, or with a target
// the sum is added there (then there is one chunk).
template <typename T, int W>
__global__ void __launch_bounds__(32 * kLanes)
    chunk_kernel(float* partial, const Target target, const T* x, int64_t rows, int64_t columns,
                 int64_t stride, int64_t chunk_rows) {
  __shared__ float shared[kLanes][32 * W];
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * W;
  const int64_t begin = blockIdx.y * chunk_rows;
  const int64_t end = begin + chunk_rows < rows ? begin + chunk_rows : rows;
  float sum[W] = {};
  if (c < columns) {
#pragma unroll 4
    for (int64_t r = begin + threadIdx.y; r < end; r += kLanes) {
      const auto pack = Pack<T, W>::load(x + r * stride + c);
#pragma unroll
      for (int i = 0; i < W; ++i) sum[i] += pack.x[i];
    }
  }
#pragma unroll
  for (int i = 0; i < W; ++i) shared[threadIdx.y][threadIdx.x * W + i] = sum[i];
  __syncthreads();
  for (int i = threadIdx.y * 32 + threadIdx.x; i < 32 * W; i += 32 * kLanes) {
    const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 * W + i;
    if (column >= columns) break;
    float total = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) total += shared[lane][i];
    if (target.out != nullptr) {
      float* to = column < target.split ? target.out + column : target.rest + column - target.split;
      *to += total;
    } else {
      partial[blockIdx.y * columns + column] = total;
    }
  }
}

template <typename T, int W>
void launch(const Stream& stream, float* partial, const Target& target, const T* x, int64_t rows,
            int64_t columns, int64_t stride, int64_t chunk_rows) {
  const dim3 grid(static_cast<unsigned>(ceil_div(columns, 32 * W)),
                  static_cast<unsigned>(ceil_div(rows, chunk_rows)));
  chunk_kernel<T, W><<<grid, dim3(32, kLanes), 0, handle_of(stream)>>>(partial, target, x, rows,
                                                                       columns, stride, chunk_rows);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void add_column_sums(const Stream& stream, float* out, ConstTensorView x, float* rest,
                     int64_t split) {
  const int64_t rows = x.size(0);
  const int64_t columns = x.size(1);
  if (rows == 0 || columns == 0) return;
  const Target target{out, rest, rest == nullptr ? columns : split};
  with_activation(x.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = 16 / sizeof(T);
    const auto* data = static_cast<const T*>(x.raw());
    if (rows <= kDirectRows) {
      launch<T, 1>(stream, nullptr, target, data, rows, columns, x.stride(0), rows);
      return;
    }
    // Two levels of about equal length.
    int64_t chunk_rows = 32;
    while (chunk_rows * chunk_rows < rows) chunk_rows *= 2;
    const int64_t chunks = ceil_div(rows, chunk_rows);
    auto* partial = static_cast<float*>(
        workspace(stream, Scratch::kColumnSums, chunks * columns * sizeof(float)));
    if (columns % kWidth == 0 && rows_aligned(x)) {
      launch<T, kWidth>(stream, partial, {}, data, rows, columns, x.stride(0), chunk_rows);
    } else {
      launch<T, 1>(stream, partial, {}, data, rows, columns, x.stride(0), chunk_rows);
    }
    launch<float, 1>(stream, nullptr, target, partial, chunks, columns, columns, chunks);
  });
}

}  // namespace muster::cuda
