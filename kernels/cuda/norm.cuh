// The one kernel pair behind RMSNorm and LayerNorm (kCenter: with mean and bias).
//
// A row is handled by blockDim.x threads: a warp (eight rows a block) where the row is short, else
// the block. Its first 2 · blockDim.x packs stay in registers between the two passes; what is
// beyond them is read again. Bytes an element: forward 2 activations, backward 3.
#pragma once

#include <algorithm>

#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/vec.cuh"

namespace muster::cuda {

constexpr int kCached = 2;
constexpr unsigned kMaxThreads = 512;

// Threads for rows of `packs` packs.
inline dim3 norm_block(int64_t packs) {
  unsigned threads = 32;
  while (threads < kMaxThreads && threads * kCached < packs) threads *= 2;
  return dim3(threads, threads == 32 ? 8 : 1);
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

template <typename T, int W, bool kCenter>
__global__ void __launch_bounds__(kMaxThreads) norm_forward_kernel(const NormForward<T> a) {
  __shared__ float scratch[32];
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (n >= a.rows) return;  // whole warps, and no barrier is shared with them
  const T* row = a.x + a.x_rows[n];
  T* out = a.out + a.out_rows[n];
  const int64_t packs = a.width / W;
  const float inverse = 1.0f / static_cast<float>(a.width);
  Pack<T, W> cached[kCached];

  // f(pack of x, its index) for the thread's packs.
  const auto each = [&](auto f) {
#pragma unroll
    for (int k = 0; k < kCached; ++k) {
      const int64_t p = threadIdx.x + k * blockDim.x;
      if (p < packs) f(cached[k], p);
    }
    for (int64_t p = threadIdx.x + kCached * blockDim.x; p < packs; p += blockDim.x) {
      f(Pack<T, W>::load(row + p * W), p);
    }
  };
#pragma unroll
  for (int k = 0; k < kCached; ++k) {
    const int64_t p = threadIdx.x + k * blockDim.x;
    if (p < packs) cached[k] = Pack<T, W>::load(row + p * W);
  }
  float mean = 0.0f;
  if constexpr (kCenter) {
    float sum = 0.0f;
    each([&](const Pack<T, W>& pack, int64_t) {
#pragma unroll
      for (int i = 0; i < W; ++i) sum += pack.x[i];
    });
    mean = block_sum(sum, scratch) * inverse;
  }
  float squares = 0.0f;
  each([&](const Pack<T, W>& pack, int64_t) {
#pragma unroll
    for (int i = 0; i < W; ++i) squares = fmaf(pack.x[i] - mean, pack.x[i] - mean, squares);
  });
  const float rstd = 1.0f / sqrtf(block_sum(squares, scratch) * inverse + a.eps);
  each([&](const Pack<T, W>& pack, int64_t p) {
    const auto weight = Pack<T, W>::load(a.weight + p * W);
    Pack<T, W> result;
#pragma unroll
    for (int i = 0; i < W; ++i) result.x[i] = (pack.x[i] - mean) * rstd * weight.x[i];
    if constexpr (kCenter) {
      const auto bias = Pack<T, W>::load(a.bias + p * W);
#pragma unroll
      for (int i = 0; i < W; ++i) result.x[i] += bias.x[i];
    }
    result.store(out + p * W);
  });
  if (threadIdx.x == 0) {
    if constexpr (kCenter) a.mean[n] = mean;
    a.rstd[n] = rstd;
  }
}

template <typename T>
struct NormBackward {
  T* grad_x;
  float* partial_weight;  // [gridDim.x · blockDim.y, width], as is partial_bias
  float* partial_bias;
  const T* grad_out;
  const T* x;
  const T* weight;
  const float* mean;
  const float* rstd;
  RowOffsets grad_x_rows, grad_out_rows, x_rows;
  int64_t rows, width;
  bool accumulate_x;
};

// Blocks stay and stride over rows, so that a thread sums its columns' weight gradients in
// registers (beyond the cached packs: in the partial rows themselves).
template <typename T, int W, bool kCenter>
__global__ void __launch_bounds__(kMaxThreads) norm_backward_kernel(const NormBackward<T> a) {
  __shared__ float scratch[32];
  const int64_t packs = a.width / W;
  const float inverse = 1.0f / static_cast<float>(a.width);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  float* partial_weight = a.partial_weight + first * a.width;
  float* partial_bias = kCenter ? a.partial_bias + first * a.width : nullptr;
  float weight_sum[kCached][W] = {};
  float bias_sum[kCached][W] = {};
  for (int64_t p = threadIdx.x + kCached * blockDim.x; p < packs; p += blockDim.x) {
    for (int i = 0; i < W; ++i) {
      partial_weight[p * W + i] = 0.0f;
      if constexpr (kCenter) partial_bias[p * W + i] = 0.0f;
    }
  }
  for (int64_t n = first; n < a.rows; n += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const T* x_row = a.x + a.x_rows[n];
    const T* out_row = a.grad_out + a.grad_out_rows[n];
    T* grad_row = a.grad_x + a.grad_x_rows[n];
    const float rstd = a.rstd[n];
    float mean = 0.0f;
    if constexpr (kCenter) mean = a.mean[n];
    Pack<T, W> x[kCached];
    Pack<T, W> grad[kCached];
#pragma unroll
    for (int k = 0; k < kCached; ++k) {
      const int64_t p = threadIdx.x + k * blockDim.x;
      if (p < packs) {
        x[k] = Pack<T, W>::load(x_row + p * W);
        grad[k] = Pack<T, W>::load(out_row + p * W);
      }
    }
    float dot = 0.0f;  // Σ g · x̂
    float sum = 0.0f;  // Σ g
    const auto add_pack = [&](const Pack<T, W>& xs, const Pack<T, W>& gs, int64_t p,
                              float* weight_to, float* bias_to) {
      const auto weight = Pack<T, W>::load(a.weight + p * W);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const float normal = (xs.x[i] - mean) * rstd;
        const float g = gs.x[i] * weight.x[i];
        dot = fmaf(g, normal, dot);
        weight_to[i] = fmaf(gs.x[i], normal, weight_to[i]);
        if constexpr (kCenter) {
          sum += g;
          bias_to[i] += gs.x[i];
        }
      }
    };
#pragma unroll
    for (int k = 0; k < kCached; ++k) {
      const int64_t p = threadIdx.x + k * blockDim.x;
      if (p < packs) add_pack(x[k], grad[k], p, weight_sum[k], bias_sum[k]);
    }
    for (int64_t p = threadIdx.x + kCached * blockDim.x; p < packs; p += blockDim.x) {
      add_pack(Pack<T, W>::load(x_row + p * W), Pack<T, W>::load(out_row + p * W), p,
               partial_weight + p * W, kCenter ? partial_bias + p * W : nullptr);
    }
    dot = block_sum(dot, scratch) * inverse;
    if constexpr (kCenter) sum = block_sum(sum, scratch) * inverse;
    const auto write_pack = [&](const Pack<T, W>& xs, const Pack<T, W>& gs, int64_t p) {
      const auto weight = Pack<T, W>::load(a.weight + p * W);
      Pack<T, W> result;
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const float normal = (xs.x[i] - mean) * rstd;
        result.x[i] = rstd * (gs.x[i] * weight.x[i] - sum - normal * dot);
      }
      if (a.accumulate_x) {
        const auto before = Pack<T, W>::load(grad_row + p * W);
#pragma unroll
        for (int i = 0; i < W; ++i) result.x[i] += before.x[i];
      }
      result.store(grad_row + p * W);
    };
#pragma unroll
    for (int k = 0; k < kCached; ++k) {
      const int64_t p = threadIdx.x + k * blockDim.x;
      if (p < packs) write_pack(x[k], grad[k], p);
    }
    for (int64_t p = threadIdx.x + kCached * blockDim.x; p < packs; p += blockDim.x) {
      write_pack(Pack<T, W>::load(x_row + p * W), Pack<T, W>::load(out_row + p * W), p);
    }
  }
#pragma unroll
  for (int k = 0; k < kCached; ++k) {
    const int64_t p = threadIdx.x + k * blockDim.x;
    if (p >= packs) continue;
#pragma unroll
    for (int i = 0; i < W; ++i) {
      partial_weight[p * W + i] = weight_sum[k][i];
      if constexpr (kCenter) partial_bias[p * W + i] = bias_sum[k][i];
    }
  }
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
    const auto launch = [&](auto kernel, int pack_width) {
      const dim3 block = norm_block(width / pack_width);
      kernel<<<static_cast<unsigned>(ceil_div(rows, block.y)), block, 0, handle_of(stream)>>>(args);
    };
    const bool vector = width % kWidth == 0 && rows_aligned(out) && rows_aligned(x) &&
                        rows_aligned(weight) && reinterpret_cast<uintptr_t>(bias) % 16 == 0;
    if (vector) {
      launch(norm_forward_kernel<T, kWidth, kCenter>, kWidth);
    } else {
      launch(norm_forward_kernel<T, 1, kCenter>, 1);
    }
  });
  CUDA_CHECK(cudaGetLastError());
}

template <bool kCenter>
void norm_backward(const Stream& stream, TensorView grad_x, float* grad_weight, float* grad_bias,
                   ConstTensorView grad_out, ConstTensorView x, ConstTensorView weight,
                   const float* mean, const float* rstd, bool accumulate_x) {
  const int64_t width = x.size(x.rank() - 1);
  const int64_t rows = x.numel() / width;
  if (rows == 0) return;
  with_activation(x.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = 16 / sizeof(T);
    const bool vector = width % kWidth == 0 && rows_aligned(grad_x) && rows_aligned(grad_out) &&
                        rows_aligned(x) && rows_aligned(weight);
    const dim3 block = norm_block(vector ? width / kWidth : width);
    // Enough blocks to fill the GPU, yet at least eight rows for each row of partial sums.
    const int64_t resident = multiprocessors() * std::max(1024u / (block.x * block.y), 1u);
    const int64_t blocks =
        std::clamp<int64_t>(ceil_div(rows, 8 * static_cast<int64_t>(block.y)), 1, resident);
    const int64_t partials = blocks * block.y;
    auto* partial = static_cast<float*>(
        workspace(stream, Scratch::kOp, partials * width * sizeof(float) * (kCenter ? 2 : 1)));
    float* partial_bias = partial + partials * width;
    const NormBackward<T> args{
        .grad_x = static_cast<T*>(grad_x.raw()),
        .partial_weight = partial,
        .partial_bias = partial_bias,
        .grad_out = static_cast<const T*>(grad_out.raw()),
        .x = static_cast<const T*>(x.raw()),
        .weight = static_cast<const T*>(weight.raw()),
        .mean = mean,
        .rstd = rstd,
        .grad_x_rows = RowOffsets(grad_x),
        .grad_out_rows = RowOffsets(grad_out),
        .x_rows = RowOffsets(x),
        .rows = rows,
        .width = width,
        .accumulate_x = accumulate_x,
    };
    const auto launch = [&](auto kernel) {
      kernel<<<static_cast<unsigned>(blocks), block, 0, handle_of(stream)>>>(args);
      CUDA_CHECK(cudaGetLastError());
    };
    if (vector) {
      launch(norm_backward_kernel<T, kWidth, kCenter>);
    } else {
      launch(norm_backward_kernel<T, 1, kCenter>);
    }
    const auto view = [&](float* data) {
      return ConstTensorView(data, DType::kFloat32, {partials, width}, stream.device);
    };
    add_column_sums(stream, grad_weight, view(partial));
    if constexpr (kCenter) add_column_sums(stream, grad_bias, view(partial_bias));
  });
}

}  // namespace muster::cuda
