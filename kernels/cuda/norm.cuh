// The forward kernel behind RMSNorm and LayerNorm (kCenter: with mean and bias), and what it shares
// with the backward one (norm_backward.cuh).
//
// A row is handled by blockDim.x threads: a warp (kBlockThreads / 32 rows a block) where the row is
// short, else a block. The first C · blockDim.x packs of a row stay in registers between the two
// passes; what is beyond them is read again. Blocks stay and stride over rows, so that weights stay
// in registers too. Bytes an element: 2 activations.
#pragma once

#include <algorithm>

#include "kernels/cuda/device.h"
#include "kernels/cuda/vec.cuh"

namespace muster::cuda {

constexpr unsigned kBlockThreads = 256;

// Cached packs a thread (two or three, whichever leaves fewer lanes idle) and threads for rows of
// `packs` packs.
struct NormShape {
  int cached = 2;
  dim3 block;

  NormShape(int64_t packs, bool vector) {
    const auto threads_for = [&](int c) {
      unsigned threads = 32;
      while (threads < kBlockThreads && threads * c < packs) threads *= 2;
      return threads;
    };
    unsigned threads = threads_for(2);
    if (vector && threads_for(3) < threads) {
      cached = 3;
      threads = threads_for(3);
    }
    block = dim3(threads, threads == 32 ? kBlockThreads / 32 : 1);
  }
};

// Sums over a row's threads of x and, with kTwo, y; every one of them gets the sums. `scratch` is
// not free on return: the next call takes another one (two in turn are enough), which saves a
// barrier.
template <bool kTwo>
__device__ float2 row_sums(float x, float y, float2* scratch) {
  x = warp_sum(x);
  if constexpr (kTwo) y = warp_sum(y);
  const int warps = blockDim.x / 32;
  if (warps == 1) return {x, y};  // the block's other rows need not come here together
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = {x, y};
  __syncthreads();
  x = y = 0.0f;
  for (int i = 0; i < warps; ++i) {
    x += scratch[i].x;
    if constexpr (kTwo) y += scratch[i].y;
  }
  return {x, y};
}

template <typename T>
struct NormForward {
  T* out;
  float* mean;  // unused without kCenter, as is bias
  float* rstd;
  const T* x;
  const T* weight;
  const T* bias;
  RowOffsets out_rows, x_rows;
  int64_t rows, width;
  float eps;
};

template <typename T, int W, bool kCenter, int C>
__global__ void __launch_bounds__(kBlockThreads) norm_forward_kernel(const NormForward<T> a) {
  __shared__ float2 scratch[3][kBlockThreads / 32];
  const int packs = static_cast<int>(a.width) / W;
  const float inverse = 1.0f / static_cast<float>(a.width);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  const int beyond = threadIdx.x + C * blockDim.x;
  Raw<T, W> weights[C];
  Raw<T, W> biases[C];
  Raw<T, W> next[C];
  const auto each_cached = [&](auto f) {
#pragma unroll
    for (int k = 0; k < C; ++k) {
      const int p = threadIdx.x + k * blockDim.x;
      if (p < packs) f(k, p);
    }
  };
  const auto load_row = [&](int64_t n) {
    if (n >= a.rows) return;
    const T* row = a.x + a.x_rows[n];
    each_cached([&](int k, int p) { next[k] = Raw<T, W>::load(row + p * W); });
  };
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  load_row(first);
  each_cached([&](int k, int p) {
    weights[k] = Raw<T, W>::load(a.weight + p * W);
    if constexpr (kCenter) biases[k] = Raw<T, W>::load(a.bias + p * W);
  });
  int turn = 0;
  for (int64_t n = first; n < a.rows; n += step) {
    Pack<T, W> cached[C];
    each_cached([&](int k, int) { cached[k] = next[k].unpack(); });
    const T* row = a.x + a.x_rows[n];
    T* out = a.out + a.out_rows[n];
    // In place, the rest of this row is read before it is written, by the same thread.
    load_row(n + step);
    // f(pack of x, its index) for the thread's packs.
    const auto each = [&](auto f) {
      each_cached([&](int k, int p) { f(cached[k], p); });
      for (int p = beyond; p < packs; p += blockDim.x) f(Pack<T, W>::load(row + p * W), p);
    };
    float mean = 0.0f;
    if constexpr (kCenter) {
      float sum = 0.0f;
      each([&](const Pack<T, W>& pack, int64_t) {
#pragma unroll
        for (int i = 0; i < W; ++i) sum += pack.x[i];
      });
      mean = row_sums<false>(sum, 0.0f, scratch[2]).x * inverse;
    }
    float squares = 0.0f;
    each([&](const Pack<T, W>& pack, int64_t) {
#pragma unroll
      for (int i = 0; i < W; ++i) squares = fmaf(pack.x[i] - mean, pack.x[i] - mean, squares);
    });
    const float variance = row_sums<false>(squares, 0.0f, scratch[turn]).x * inverse;
    turn ^= 1;
    const float rstd = 1.0f / sqrtf(variance + a.eps);
    const auto write = [&](const Pack<T, W>& pack, const Raw<T, W>& raw_weight,
                           const Raw<T, W>& raw_bias, int p) {
      const auto weight = raw_weight.unpack();
      Pack<T, W> result;
#pragma unroll
      for (int i = 0; i < W; ++i) result.x[i] = (pack.x[i] - mean) * rstd * weight.x[i];
      if constexpr (kCenter) {
        const auto bias = raw_bias.unpack();
#pragma unroll
        for (int i = 0; i < W; ++i) result.x[i] += bias.x[i];
      }
      result.store(out + p * W);
    };
    each_cached([&](int k, int p) { write(cached[k], weights[k], biases[k], p); });
    for (int p = beyond; p < packs; p += blockDim.x) {
      Raw<T, W> bias{};
      if constexpr (kCenter) bias = Raw<T, W>::load(a.bias + p * W);
      write(Pack<T, W>::load(row + p * W), Raw<T, W>::load(a.weight + p * W), bias, p);
    }
    if (threadIdx.x == 0) {
      if constexpr (kCenter) a.mean[n] = mean;
      a.rstd[n] = rstd;
    }
  }
}

// Blocks that fill the GPU, but no more than `wanted`.
template <typename Kernel>
int64_t resident_blocks(Kernel kernel, dim3 block, int shared_bytes, int64_t wanted) {
  int resident = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &resident, kernel, static_cast<int>(block.x * block.y), shared_bytes));
  const int64_t most = static_cast<int64_t>(multiprocessors()) * std::max(resident, 1);
  return std::clamp<int64_t>(wanted, 1, most);
}

template <bool kCenter>
void norm_forward(const Stream& stream, TensorView out, float* mean, float* rstd, ConstTensorView x,
                  ConstTensorView weight, const void* bias, float eps) {
  const int64_t width = x.size(x.rank() - 1);
  const int64_t rows = x.numel() / width;
  if (rows == 0) return;
  with_activation(x.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = 16 / sizeof(T);
    const NormForward<T> args{
        .out = static_cast<T*>(out.raw()),
        .mean = mean,
        .rstd = rstd,
        .x = static_cast<const T*>(x.raw()),
        .weight = static_cast<const T*>(weight.raw()),
        .bias = static_cast<const T*>(bias),
        .out_rows = RowOffsets(out),
        .x_rows = RowOffsets(x),
        .rows = rows,
        .width = width,
        .eps = eps,
    };
    const auto launch = [&](auto kernel, dim3 block) {
      const int64_t blocks = resident_blocks(kernel, block, 0, ceil_div(rows, block.y));
      kernel<<<static_cast<unsigned>(blocks), block, 0, handle_of(stream)>>>(args);
    };
    const bool vector = width % kWidth == 0 && rows_aligned(out) && rows_aligned(x) &&
                        rows_aligned(weight) && reinterpret_cast<uintptr_t>(bias) % 16 == 0;
    const NormShape shape(vector ? width / kWidth : width, vector);
    if (!vector) {
      launch(norm_forward_kernel<T, 1, kCenter, 2>, shape.block);
    } else if (shape.cached == 2) {
      launch(norm_forward_kernel<T, kWidth, kCenter, 2>, shape.block);
    } else {
      launch(norm_forward_kernel<T, kWidth, kCenter, 3>, shape.block);
    }
  });
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace muster::cuda
