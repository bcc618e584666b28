// The norms' backward for aligned rows that are not too long, on Hopper (kCenter: LayerNorm, with
// mean and bias). One block a multiprocessor stays and strides over rows. A row belongs to a group
// of one warp or a few: the copy engine brings the group's coming rows into a ring of slots in
// shared memory, the lanes take a row into registers and free its slot, and the sums of weight
// gradients stay in registers to the end. A second short kernel adds the blocks' sums.
#pragma once

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/norm.cuh"

namespace muster::cuda {

template <typename T>
struct NormBackward {
  T* grad_x;
  float* partial;  // [gridDim.x, width]; with kCenter [.., 2 · width], the bias after the weight
  const T* grad_out;
  const T* x;
  const T* weight;
  const float* mean;
  const float* rstd;
  RowOffsets grad_x_rows, grad_out_rows, x_rows;
  int64_t rows, width;
  bool accumulate_x;
};

// A third row in the ring (the old grad_x) takes the registers and the shared memory of half the
// warps.
template <bool kAccumulate>
constexpr int kRingWarps = kAccumulate ? 8 : 16;
// Packs of a lane: LayerNorm sums twice as much in registers.
template <bool kCenter, bool kAccumulate>
constexpr int kMaxRingPacks = kCenter && !kAccumulate ? 3 : 4;
// Rows of a group on the way, with C packs a lane.
template <bool kAccumulate, int C>
constexpr int kRingSlots = C == 1        ? 8
                           : kAccumulate ? 16 / C
                           : C == 3      ? 3
                                         : 8 / C;
template <bool kAccumulate, int C>
constexpr int kRingBytes = kRingWarps<kAccumulate> * 32 *
                           kRingSlots<kAccumulate, C>*(kAccumulate ? 3 : 2) * C * 16;

// A barrier of one group's threads; number 0 is __syncthreads().
__device__ inline void group_barrier(int group, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
}

template <typename T, bool kCenter, bool kAccumulate, int C>
__global__ void __launch_bounds__(kRingWarps<kAccumulate> * 32, 1)
    norm_ring_kernel(const NormBackward<T> a, int row_warps) {
  constexpr int W = 16 / sizeof(T);
  constexpr int kWarps = kRingWarps<kAccumulate>;
  constexpr int kSlots = kRingSlots<kAccumulate, C>;
  constexpr int kArrays = kAccumulate ? 3 : 2;
  extern __shared__ uint4 ring[];  // [group][slot][array][pack of the row], then the weights
  __shared__ float2 scratch[2][kWarps];
  __shared__ BulkBarrier full[kWarps][kSlots];
  let_next_kernel_start();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int group = warp / row_warps;
  const int part = warp % row_warps;
  const int groups = kWarps / row_warps;
  const int packs = static_cast<int>(a.width) / W;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * groups + group;
  const int64_t step = static_cast<int64_t>(gridDim.x) * groups;
  const int row_threads = row_warps * 32;
  const int row_packs = C * row_threads;  // room for a row
  uint4* mine = ring + group * kSlots * kArrays * row_packs;
  uint4* weights = ring + kWarps * 32 * kSlots * kArrays * C;
  const int own = part * 32 + lane;
  // f(k, index in the row) for the lane's packs.
  const auto each = [&](auto f) {
#pragma unroll
    for (int k = 0; k < C; ++k) {
      if (own + k * row_threads < packs) f(k, own + k * row_threads);
    }
  };

  if (own == 0) {
    for (int s = 0; s < kSlots; ++s) init_bulk_barrier(&full[group][s]);
    publish_bulk_barriers();
  }
  __syncthreads();
  const auto load = [&](int64_t n, int slot) {
    if (n >= a.rows || own != 0) return;
    uint4* to = mine + slot * kArrays * row_packs;
    BulkBarrier* barrier = &full[group][slot];
    const uint32_t bytes = packs * 16;
    expect_bulk_bytes(barrier, bytes * kArrays);
    copy_bulk(to, a.x + a.x_rows[n], bytes, barrier);
    copy_bulk(to + row_packs, a.grad_out + a.grad_out_rows[n], bytes, barrier);
    if constexpr (kAccumulate) {
      copy_bulk(to + 2 * row_packs, a.grad_x + a.grad_x_rows[n], bytes, barrier);
    }
  };
  for (int s = 0; s < kSlots; ++s) load(first + s * step, s);
  float next_rstd = 0.0f;
  float next_mean = 0.0f;
  const auto load_statistics = [&](int64_t n) {
    if (n >= a.rows) return;
    next_rstd = a.rstd[n];
    if constexpr (kCenter) next_mean = a.mean[n];
  };
  load_statistics(first);
  for (int p = threadIdx.x; p < packs; p += kWarps * 32) {
    weights[p] = reinterpret_cast<const uint4*>(a.weight)[p];
  }
  __syncthreads();

  float weight_sum[C][W] = {};
  float bias_sum[C][W] = {};
  const float inverse = 1.0f / static_cast<float>(a.width);
  int slot = 0;
  int turn = 0;
  uint32_t parity = 0;
  for (int64_t n = first; n < a.rows; n += step) {
    wait_bulk(&full[group][slot], parity);
    const uint4* from = mine + slot * kArrays * row_packs;
    Raw<T, W> x[C];
    Raw<T, W> grad[C];
    Raw<T, W> before[kAccumulate ? C : 1];
    each([&](int k, int p) {
      x[k] = {from[p]};
      grad[k] = {from[row_packs + p]};
      if constexpr (kAccumulate) before[k] = {from[2 * row_packs + p]};
    });
    const float rstd = next_rstd;
    const float mean = next_mean;
    load_statistics(n + step);
    Pack<T, W> products[C];  // g = grad_out · weight
    float dots[2] = {};      // Σ g · x̂; RMSNorm: Σ g · x
    float sum = 0.0f;        // Σ g
    const float shift = -mean * rstd;
    each([&](int k, int p) {
      const auto xs = x[k].unpack();
      const auto gs = grad[k].unpack();
      const auto weight = Raw<T, W>{weights[p]}.unpack();
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const float normal = kCenter ? fmaf(xs.x[i], rstd, shift) : xs.x[i] * rstd;
        const float g = gs.x[i] * weight.x[i];
        products[k].x[i] = g;
        dots[i % 2] = fmaf(g, kCenter ? normal : xs.x[i], dots[i % 2]);
        weight_sum[k][i] = fmaf(gs.x[i], normal, weight_sum[k][i]);
        if constexpr (kCenter) {
          sum += g;
          bias_sum[k][i] += gs.x[i];
        }
      }
    });
    float dot = warp_sum(dots[0] + dots[1]);
    if constexpr (kCenter) sum = warp_sum(sum);
    if (row_warps > 1) {
      float2* sums = scratch[turn] + group * row_warps;
      if (lane == 0) sums[part] = {dot, sum};
      group_barrier(group, row_threads);
      dot = sum = 0.0f;
      for (int i = 0; i < row_warps; ++i) {
        dot += sums[i].x;
        if constexpr (kCenter) sum += sums[i].y;
      }
      turn ^= 1;
    } else {
      __syncwarp();
    }
    // The whole group is past its reads of the slot.
    load(n + kSlots * step, slot);
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
    // grad_x = rstd · (g − mean(g) − x̂ · mean(g · x̂)) = g · rstd + x · slope + offset.
    const float mean_dot = (kCenter ? dot : dot * rstd) * inverse;
    const float slope = -mean_dot * rstd * rstd;
    const float offset = kCenter ? -fmaf(sum * inverse, rstd, mean * slope) : 0.0f;
    T* grad_row = a.grad_x + a.grad_x_rows[n];
    each([&](int k, int p) {
      const auto xs = x[k].unpack();
      Pack<T, W> result;
#pragma unroll
      for (int i = 0; i < W; ++i) {
        result.x[i] = fmaf(products[k].x[i], rstd, fmaf(xs.x[i], slope, offset));
      }
      if constexpr (kAccumulate) {
        const auto old = before[k].unpack();
#pragma unroll
        for (int i = 0; i < W; ++i) result.x[i] += old.x[i];
      }
      result.store(grad_row + p * W);
    });
  }

  // The block's groups are added in order. The ring is done with: every row that was loaded was
  // waited for.
  const int columns = static_cast<int>(a.width) * (kCenter ? 2 : 1);
  auto* totals = reinterpret_cast<float*>(ring);
  __syncthreads();
  each([&](int k, int p) {
    auto* to = reinterpret_cast<float4*>(totals + group * columns + p * W);
    auto* bias_to = reinterpret_cast<float4*>(totals + group * columns + a.width + p * W);
#pragma unroll
    for (int i = 0; i < W / 4; ++i) {
      const float* w = weight_sum[k] + 4 * i;
      to[i] = make_float4(w[0], w[1], w[2], w[3]);
      if constexpr (kCenter) {
        const float* b = bias_sum[k] + 4 * i;
        bias_to[i] = make_float4(b[0], b[1], b[2], b[3]);
      }
    }
  });
  __syncthreads();
  float* partial = a.partial + static_cast<int64_t>(blockIdx.x) * columns;
  for (int c = threadIdx.x; c < columns; c += kWarps * 32) {
    float total = totals[c];
    for (int g = 1; g < groups; ++g) total += totals[g * columns + c];
    partial[c] = total;
  }
}

constexpr int kTotalLanes = 16;  // threads that share a column

// Adds the sum of partial's rows to grad_weight and, for the columns from `width` on, grad_bias.
// Block (32, kTotalLanes): 32 columns.
static __global__ void __launch_bounds__(32 * kTotalLanes)
    norm_total_kernel(float* grad_weight, float* grad_bias, const float* partial, int rows,
                      int width, int columns) {
  __shared__ float shared[kTotalLanes][32];
  const int c = static_cast<int>(blockIdx.x) * 32 + threadIdx.x;
  float* to = c < width ? grad_weight + c : grad_bias + c - width;
  // The kernel ahead leaves these alone; it is launched plainly, so what came before it has ended.
  const float before = threadIdx.y == 0 && c < columns ? *to : 0.0f;
  wait_for_kernel_ahead();
  float sum = 0.0f;
  if (c < columns) {
#pragma unroll 8
    for (int r = threadIdx.y; r < rows; r += kTotalLanes) {
      sum += partial[static_cast<int64_t>(r) * columns + c];
    }
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || c >= columns) return;
  float total = 0.0f;
  for (int lane = 0; lane < kTotalLanes; ++lane) total += shared[lane][threadIdx.x];
  *to = before + total;
}

// Runs the ring kernel where it can: false, and nothing is done, where rows are too long or too
// short for it (below 512 bytes a warp's lanes idle and copies are many) or the GPU is too old.
// `args` has no `partial` yet; all its rows are aligned to 16 bytes.
template <typename T, bool kCenter, bool kAccumulate>
bool norm_backward_ring(const Stream& stream, NormBackward<T> args, float* grad_weight,
                        float* grad_bias) {
  constexpr int kWarps = kRingWarps<kAccumulate>;
  constexpr int kMax = kMaxRingPacks<kCenter, kAccumulate>;
  const int64_t packs = args.width * static_cast<int64_t>(sizeof(T)) / 16;
  if (!hopper_or_newer() || packs < 32 || packs > kWarps * 32 * kMax) return false;
  int row_warps = 1;
  while (row_warps * 32 * kMax < packs) row_warps *= 2;
  const auto launch = [&](auto kernel, int ring_bytes) {
    const int shared_bytes = ring_bytes + static_cast<int>(packs) * 16;
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    // A few rows at least for each group.
    const int64_t blocks =
        std::clamp<int64_t>(ceil_div(args.rows, kWarps / row_warps * 4), 1, multiprocessors());
    const auto columns = static_cast<int>(args.width) * (kCenter ? 2 : 1);
    args.partial =
        static_cast<float*>(workspace(stream, Scratch::kOp, blocks * columns * sizeof(float)));
    kernel<<<static_cast<unsigned>(blocks), kWarps * 32, shared_bytes, handle_of(stream)>>>(
        args, row_warps);
    CUDA_CHECK(cudaGetLastError());
    launch_behind(stream, norm_total_kernel, dim3(static_cast<unsigned>(ceil_div(columns, 32))),
                  dim3(32, kTotalLanes), grad_weight, grad_bias, args.partial,
                  static_cast<int>(blocks), static_cast<int>(args.width), columns);
  };
  const auto with_packs = [&](auto c) {
    constexpr int C = decltype(c)::value;
    launch(norm_ring_kernel<T, kCenter, kAccumulate, C>, kRingBytes<kAccumulate, C>);
  };
  switch (ceil_div(packs, row_warps * 32)) {
    case 1:
      with_packs(std::integral_constant<int, 1>());
      break;
    case 2:
      with_packs(std::integral_constant<int, 2>());
      break;
    case 3:
      with_packs(std::integral_constant<int, 3>());
      break;
    default:
      with_packs(std::integral_constant<int, kMax>());
  }
  return true;
}

}  // namespace muster::cuda
