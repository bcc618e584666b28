// Flash attention, backward, for Hopper (sm_90a), in one pass over the pairs of tiles that owns
// keys (attention_hopper_backward.cuh): their gradients stay in registers, those of the queries are
// added up in global memory, in float32. Before it come the statistics of the queries, after it the
// rounding of their gradients.
#include <algorithm>

#include "kernels/attention/attention_hopper_backward.cuh"
#include "kernels/cuda/device.h"

namespace muster::cuda {
namespace hopper {

constexpr int kConvertThreads = 256;

template <int D, bool kDeterministic>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ AttentionArgs a,
                    const __grid_constant__ BackwardMaps maps,
                    const __grid_constant__ BackwardScratch scratch,
                    const __grid_constant__ BackwardGrid grid) {
#if MUSTER_HOPPER_CODE
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& memory = *reinterpret_cast<BackwardMemory<D>*>(shared);
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kKeyStages<D>; ++i) {
      init_barrier(&memory.kv_full[i], 1);
      init_barrier(&memory.kv_free[i], 4 * kConsumers);
    }
    for (int i = 0; i < 2; ++i) {
      init_barrier(&memory.index_full[i], 1);
      init_barrier(&memory.index_free[i], 4 * kConsumers + 1);
    }
    for (int i = 0; i < kStages; ++i) {
      init_barrier(&memory.q_full[i], 1);
      init_barrier(&memory.o_full[i], 1);
      init_barrier(&memory.q_free[i], 4 * kConsumers);
      init_barrier(&memory.o_free[i], 4 * kConsumers);
      init_barrier(&memory.ds_full[i], 4 * kConsumers);
      init_barrier(&memory.ds_free[i], 4 * kConsumers);
    }
    for (int g = 0; g < kConsumers; ++g) {
      init_barrier(&memory.dq_full[g], 4);
      init_barrier(&memory.dq_free[g], 1);
    }
    publish_barriers();
  }
  __syncthreads();
  uint32_t copies = 0;
  uint32_t number = 0;
  if (group == 0) {
    give_registers<24>();
    if (threadIdx.x == 0) {
      produce<D>(a, memory, maps, grid, scratch);
    } else if (threadIdx.x == 32) {
      for_each_block<D>(a, memory, grid, true, [&](const KeyBlock& block) {
        add_grad_q<D, kDeterministic>(a, memory, maps, block, scratch, number);
        number += block.steps;
      });
      wait_adds();
    }
  } else {
    take_registers<240>();
    for_each_block<D>(a, memory, grid, false, [&](const KeyBlock& block) {
      consume<D>(a, memory, block, group - 1, copies, number);
      number += block.steps;
      copies += block.steps > 0 ? 1 : 0;
    });
  }
#endif
}

// Fills the statistics, and the sums of dQ with zeros.
template <int D>
__global__ void __launch_bounds__(kConvertThreads)
    prepare_kernel(const __grid_constant__ AttentionArgs a, const BackwardScratch scratch) {
  constexpr int kLanes = D / 8;  // of a row
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kConvertThreads + threadIdx.x) / kLanes;
  const int64_t n = index / a.heads_q;
  const int64_t h = index - n * a.heads_q;
  const int d = threadIdx.x % kLanes * 8;
  float sum = 0.0f;
  if (n < a.total_q) {
    const auto x = Pack<bf16, 8>::load(static_cast<const bf16*>(a.out.data) + n * a.out.row +
                                       h * a.out.head + d);
    const auto y = Pack<bf16, 8>::load(static_cast<const bf16*>(a.grad_out.data) +
                                       n * a.grad_out.row + h * a.grad_out.head + d);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(x.x[i], y.x[i], sum);
    auto* zeros = reinterpret_cast<float4*>(scratch.grad_q + (h * a.total_q + n) * D + d);
    zeros[0] = zeros[1] = {0.0f, 0.0f, 0.0f, 0.0f};
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  if (n < a.total_q && d == 0) {
    int segment = 0;  // the last that begins at or before n
    for (int end = a.segments; end - segment > 1;) {
      const int middle = (segment + end) / 2;
      if (a.cu_q[middle] <= n) {
        segment = middle;
      } else {
        end = middle;
      }
    }
    constexpr int kRows = kQueries<D>;
    const int row = static_cast<int>(n) - a.cu_q[segment];
    float* to = scratch.statistics +
                (h * scratch.tiles + a.cu_q[segment] / kRows + segment + row / kRows) * 2 * kRows +
                row % kRows;
    to[0] = a.lse[h * a.total_q + n] * kLog2e;
    to[kRows] = sum;
  }
}

// grad_q from its sums.
template <int D>
__global__ void __launch_bounds__(kConvertThreads)
    convert_kernel(const __grid_constant__ AttentionArgs a, const BackwardScratch scratch) {
  constexpr int kLanes = D / 8;
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kConvertThreads + threadIdx.x) / kLanes;
  const int64_t n = index / a.heads_q;
  const int64_t h = index - n * a.heads_q;
  if (n >= a.total_q) return;
  const int d = threadIdx.x % kLanes * 8;
  auto pack = Pack<float, 8>::load(scratch.grad_q + (h * a.total_q + n) * D + d);
  Pack<bf16, 8> result;
#pragma unroll
  for (int i = 0; i < 8; ++i) result.x[i] = pack.x[i] * a.scale;
  result.store(static_cast<bf16*>(a.grad_q.data) + n * a.grad_q.row + h * a.grad_q.head + d);
}

// Units of blocks at a time: few enough that their queries' tiles (q, grad_out and dQ) mostly stay
// in the L2 cache; more where a block goes through several heads and takes longer, so that long
// blocks are not left over at the end.
template <int D>
int units_at_a_time(const AttentionArgs& args) {
  constexpr int64_t kCacheBytes = 24 << 20;
  const int64_t bytes = int64_t{args.max_q} * D * 8;
  const int64_t units = kCacheBytes * (args.heads_q / args.heads_k) / std::max<int64_t>(bytes, 1);
  return static_cast<int>(std::clamp<int64_t>(units, 1, int64_t{args.segments} * args.heads_k));
}

template <int D>
void launch(const Stream& stream, const AttentionArgs& args, bool deterministic) {
  const cudaStream_t handle = handle_of(stream);
  BackwardScratch scratch;
  scratch.tiles = args.total_q / kQueries<D> + args.segments + 1;
  const auto aligned = [](int64_t bytes) { return ceil_div(bytes, 256) * 256; };
  const int64_t places = args.heads_q * scratch.tiles;
  const int64_t sums = aligned(args.heads_q * args.total_q * D * int64_t{sizeof(float)});
  const int64_t statistics = aligned(places * 2 * kQueries<D> * int64_t{sizeof(float)});
  const int64_t turns = (deterministic ? places + 1 : 1) * int64_t{sizeof(int)};
  auto* memory = static_cast<unsigned char*>(
      workspace(stream, Scratch::kOp, static_cast<size_t>(sums + statistics + turns)));
  scratch.grad_q = reinterpret_cast<float*>(memory);
  scratch.statistics = reinterpret_cast<float*>(memory + sums);
  scratch.next = reinterpret_cast<int*>(memory + sums + statistics);
  scratch.turns = scratch.next + 1;
  CUDA_CHECK(
      cudaMemsetAsync(scratch.statistics, 0, static_cast<size_t>(statistics + turns), handle));

  const auto row_blocks =
      static_cast<unsigned>(ceil_div(args.total_q * args.heads_q * (D / 8), kConvertThreads));
  prepare_kernel<D><<<row_blocks, kConvertThreads, 0, handle>>>(args, scratch);
  CUDA_CHECK(cudaGetLastError());

  BackwardGrid grid;
  grid.blocks_per_segment = static_cast<int>(ceil_div(args.max_k, kKeys));
  grid.units = units_at_a_time<D>(args);
  grid.count = grid.blocks_per_segment * args.segments * args.heads_k;
  if (grid.count > 0) {
    BackwardMaps maps;
    maps.q = head_map(args.q, args.total_q, args.heads_q, D, kQueries<D>);
    maps.k = head_map(args.k, args.total_k, args.heads_k, D, kKeys);
    maps.v = head_map(args.v, args.total_k, args.heads_k, D, kKeys);
    maps.grad_out = head_map(args.grad_out, args.total_q, args.heads_q, D, kQueries<D>);
    maps.grad_q = float_map(scratch.grad_q, args.heads_q, args.total_q, D, kBoxRows);
    const auto kernel = deterministic ? backward_kernel<D, true> : backward_kernel<D, false>;
    constexpr int kBytes = sizeof(BackwardMemory<D>);
    static_assert(kBytes <= 227 * 1024);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    kernel<<<std::min(grid.count, multiprocessors()), kThreads, kBytes, handle>>>(args, maps,
                                                                                  scratch, grid);
    CUDA_CHECK(cudaGetLastError());
  }
  convert_kernel<D><<<row_blocks, kConvertThreads, 0, handle>>>(args, scratch);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace hopper

void hopper_attention_backward(const Stream& stream, const AttentionArgs& args,
                               bool deterministic) {
  using namespace hopper;
  if (args.width == 64) {
    launch<64>(stream, args, deterministic);
  } else {
    launch<128>(stream, args, deterministic);
  }
}

}  // namespace muster::cuda
