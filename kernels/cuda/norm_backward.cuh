// The backward kernels behind RMSNorm and LayerNorm (kCenter: with mean and bias). Bytes an
// element: 3 activations, 4 where grad_x accumulates.
//
// norm_ring.cuh has the fast one. The one here, with rows and registers as in norm.cuh and the next
// row loaded ahead into registers, takes unaligned and very long rows, and all on older GPUs.
#pragma once

#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/norm_ring.cuh"

namespace muster::cuda {

template <typename T, int W, bool kCenter, int C>
__global__ void __launch_bounds__(kBlockThreads) norm_backward_kernel(const NormBackward<T> a) {
  __shared__ float2 scratch[2][kBlockThreads / 32];
  extern __shared__ float block_total[];  // a row of `partial`, where rows share a block
  const int packs = static_cast<int>(a.width) / W;
  const float inverse = 1.0f / static_cast<float>(a.width);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  float* partial_weight = a.partial + blockIdx.x * a.width * (kCenter ? 2 : 1);
  float* partial_bias = partial_weight + a.width;
  const int beyond = threadIdx.x + C * blockDim.x;
  float weight_sum[C][W] = {};
  float bias_sum[C][W] = {};
  for (int p = beyond; p < packs; p += blockDim.x) {
    for (int i = 0; i < W; ++i) {
      partial_weight[p * W + i] = 0.0f;
      if constexpr (kCenter) partial_bias[p * W + i] = 0.0f;
    }
  }
  const auto each_cached = [&](auto f) {
#pragma unroll
    for (int k = 0; k < C; ++k) {
      const int p = threadIdx.x + k * blockDim.x;
      if (p < packs) f(k, p);
    }
  };
  Raw<T, W> next_x[C];
  Raw<T, W> next_grad[C];
  float next_rstd = 0.0f;
  float next_mean = 0.0f;
  const auto load_row = [&](int64_t n) {
    if (n >= a.rows) return;
    const T* x_row = a.x + a.x_rows[n];
    const T* out_row = a.grad_out + a.grad_out_rows[n];
    each_cached([&](int k, int p) {
      next_x[k] = Raw<T, W>::load(x_row + p * W);
      next_grad[k] = Raw<T, W>::load(out_row + p * W);
    });
    next_rstd = a.rstd[n];
    if constexpr (kCenter) next_mean = a.mean[n];
  };
  load_row(first);
  Raw<T, W> weights[C];
  each_cached([&](int k, int p) { weights[k] = Raw<T, W>::load(a.weight + p * W); });

  int turn = 0;
  for (int64_t n = first; n < a.rows; n += step) {
    Raw<T, W> x[C];
    Raw<T, W> grad[C];
    each_cached([&](int k, int) {
      x[k] = next_x[k];
      grad[k] = next_grad[k];
    });
    const float rstd = next_rstd;
    const float mean = next_mean;
    load_row(n + step);
    const T* x_row = a.x + a.x_rows[n];
    const T* out_row = a.grad_out + a.grad_out_rows[n];
    T* grad_row = a.grad_x + a.grad_x_rows[n];
    float dot = 0.0f;  // Σ g · x̂
    float sum = 0.0f;  // Σ g
    const auto add_pack = [&](const Pack<T, W>& xs, const Pack<T, W>& gs, const Pack<T, W>& weight,
                              float* weight_to, float* bias_to) {
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
    each_cached([&](int k, int) {
      add_pack(x[k].unpack(), grad[k].unpack(), weights[k].unpack(), weight_sum[k], bias_sum[k]);
    });
    for (int p = beyond; p < packs; p += blockDim.x) {
      add_pack(Pack<T, W>::load(x_row + p * W), Pack<T, W>::load(out_row + p * W),
               Pack<T, W>::load(a.weight + p * W), partial_weight + p * W, partial_bias + p * W);
    }
    const float2 sums = row_sums<kCenter>(dot, sum, scratch[turn]);
    turn ^= 1;
    const float mean_dot = sums.x * inverse;
    const float mean_sum = sums.y * inverse;
    const auto write_pack = [&](const Pack<T, W>& xs, const Pack<T, W>& gs,
                                const Pack<T, W>& weight, int p) {
      Pack<T, W> result;
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const float normal = (xs.x[i] - mean) * rstd;
        result.x[i] = rstd * (gs.x[i] * weight.x[i] - mean_sum - normal * mean_dot);
      }
      if (a.accumulate_x) {
        const auto before = Pack<T, W>::load(grad_row + p * W);
#pragma unroll
        for (int i = 0; i < W; ++i) result.x[i] += before.x[i];
      }
      result.store(grad_row + p * W);
    };
    each_cached(
        [&](int k, int p) { write_pack(x[k].unpack(), grad[k].unpack(), weights[k].unpack(), p); });
    for (int p = beyond; p < packs; p += blockDim.x) {
      write_pack(Pack<T, W>::load(x_row + p * W), Pack<T, W>::load(out_row + p * W),
                 Pack<T, W>::load(a.weight + p * W), p);
    }
  }
  // The rows of the block one after the other, which fixes the order.
  float* weight_total = blockDim.y > 1 ? block_total : partial_weight;
  float* bias_total = weight_total + a.width;
  for (int row = 0; row < blockDim.y; ++row) {
    __syncthreads();
    if (threadIdx.y != row) continue;
    each_cached([&](int k, int p) {
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const int at = p * W + i;
        weight_total[at] = (row > 0 ? weight_total[at] : 0.0f) + weight_sum[k][i];
        if constexpr (kCenter) bias_total[at] = (row > 0 ? bias_total[at] : 0.0f) + bias_sum[k][i];
      }
    });
  }
  if (blockDim.y == 1) return;
  __syncthreads();
  const int columns = static_cast<int>(a.width) * (kCenter ? 2 : 1);
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < columns; i += blockDim.x * blockDim.y) {
    partial_weight[i] = block_total[i];
  }
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
    NormBackward<T> args{
        .grad_x = static_cast<T*>(grad_x.raw()),
        .partial = nullptr,
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
    const bool vector = width % kWidth == 0 && rows_aligned(grad_x) && rows_aligned(grad_out) &&
                        rows_aligned(x) && rows_aligned(weight);
    if (vector &&
        (accumulate_x
             ? norm_backward_ring<T, kCenter, true>(stream, args, grad_weight, grad_bias)
             : norm_backward_ring<T, kCenter, false>(stream, args, grad_weight, grad_bias))) {
      return;
    }
    const auto launch = [&](auto kernel, dim3 block) {
      const int64_t columns = kCenter ? 2 * width : width;
      const int shared_bytes = block.y > 1 ? static_cast<int>(columns * sizeof(float)) : 0;
      // At least eight rows for each row of partial sums.
      const int64_t blocks = resident_blocks(kernel, block, shared_bytes,
                                             ceil_div(rows, 8 * static_cast<int64_t>(block.y)));
      args.partial =
          static_cast<float*>(workspace(stream, Scratch::kOp, blocks * columns * sizeof(float)));
      kernel<<<static_cast<unsigned>(blocks), block, shared_bytes, handle_of(stream)>>>(args);
      CUDA_CHECK(cudaGetLastError());
      const ConstTensorView sums(args.partial, DType::kFloat32, {blocks, columns}, stream.device);
      add_column_sums(stream, grad_weight, sums, grad_bias, width);
    };
    const NormShape shape(vector ? width / kWidth : width, vector);
    if (!vector) {
      launch(norm_backward_kernel<T, 1, kCenter, 2>, shape.block);
    } else if (shape.cached == 2) {
      launch(norm_backward_kernel<T, kWidth, kCenter, 2>, shape.block);
    } else {
      launch(norm_backward_kernel<T, kWidth, kCenter, 3>, shape.block);
    }
  });
}

}  // namespace muster::cuda
