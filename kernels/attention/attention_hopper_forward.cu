// Flash attention, forward, for Hopper (sm_90a). README.md of this folder has the schedule.
#include <algorithm>

#include "kernels/attention/attention_hopper.cuh"
#include "kernels/cuda/device.h"

namespace muster::cuda {
namespace hopper {

// One block of queries of one head.
struct QueryBlock {
  int head = 0;
  int head_k = 0;
  int q_begin = 0;
  int q_count = 0;
  int k_begin = 0;
  int k_count = 0;
  int row0 = 0;
  int offset = 0;  // query i of the segment sees keys up to i + offset
  int tiles = 0;   // of keys that some query sees

  // The blocks that see the most keys come first. False where a segment has no such block.
  __device__ bool find(const AttentionArgs& a, int index, int blocks_per_segment, int rows,
                       int keys) {
    const int columns = a.segments * a.heads_q;
    const int block = blocks_per_segment - 1 - index / columns;
    const int column = index % columns;
    const int segment = column / a.heads_q;
    head = column - segment * a.heads_q;
    head_k = head / (a.heads_q / a.heads_k);
    q_begin = a.cu_q[segment];
    q_count = a.cu_q[segment + 1] - q_begin;
    k_begin = a.cu_k[segment];
    k_count = a.cu_k[segment + 1] - k_begin;
    row0 = block * rows;
    offset = k_count - q_count;
    tiles = tiles_of(a, row0 + rows, keys);
    return row0 < q_count;
  }
  // Tiles of keys that the queries before row `end` see.
  __device__ int tiles_of(const AttentionArgs& a, int end, int keys) const {
    const int keys_end = a.causal ? min(k_count, min(end, q_count) + offset) : k_count;
    return keys_end > 0 ? (keys_end + keys - 1) / keys : 0;
  }
};

template <int Consumers, int Stages, int ConsumerRegisters, int ProducerRegisters>
struct ForwardCut {
  static constexpr int kConsumers = Consumers;  // warpgroups of 64 queries each
  static constexpr int kStages = Stages;        // tiles of keys, and of values, in shared memory
  static constexpr int kConsumerRegisters = ConsumerRegisters;
  static constexpr int kProducerRegisters = ProducerRegisters;
  static constexpr int kRows = 64 * Consumers;
  static constexpr int kKeys = 128;
  static constexpr int kThreads = kWarpgroup * (Consumers + 1);
};
template <int D>
struct Forward;
template <>
struct Forward<64> : ForwardCut<3, 4, 160, 32> {};
template <>
struct Forward<128> : ForwardCut<2, 2, 240, 24> {};

template <int D>
struct ForwardMemory {
  using Cut = Forward<D>;
  alignas(1024) unsigned char q[Cut::kRows * D * 2];
  alignas(1024) unsigned char out[Cut::kRows * D * 2];
  alignas(1024) unsigned char k[Cut::kStages][Cut::kKeys * D * 2];
  alignas(1024) unsigned char v[Cut::kStages][Cut::kKeys * D * 2];
  Barrier q_full;
  Barrier q_free;
  Barrier k_full[Cut::kStages];
  Barrier k_free[Cut::kStages];
  Barrier v_full[Cut::kStages];
  Barrier v_free[Cut::kStages];
};

// The n-th block of queries that this block of threads works on, of `count` sorted by falling work:
// forth and back through the multiprocessors, so that all get about as much. −1: no more.
__device__ inline int nth_index(int n, int count) {
  const auto width = static_cast<int>(gridDim.x);
  const int place = n % 2 == 0 ? blockIdx.x : width - 1 - blockIdx.x;
  const int64_t index = static_cast<int64_t>(n) * width + place;
  return index < count ? static_cast<int>(index) : -1;
}

template <int D>
__device__ void produce(const AttentionArgs& a, ForwardMemory<D>& memory, const CUtensorMap* q_map,
                        const CUtensorMap* k_map, const CUtensorMap* v_map, int blocks_per_segment,
                        int count) {
  using Cut = Forward<D>;
  constexpr uint32_t kTileBytes = Cut::kKeys * D * 2;
  constexpr uint32_t kPanelBytes = Cut::kKeys * kPanelRowBytes;
  uint32_t tile = 0;
  uint32_t item = 0;
  for (int n = 0; nth_index(n, count) >= 0; ++n) {
    QueryBlock block;
    if (!block.find(a, nth_index(n, count), blocks_per_segment, Cut::kRows, Cut::kKeys) ||
        block.tiles == 0) {
      continue;
    }
    wait(&memory.q_free, (item & 1) ^ 1);
    arrive_expecting(&memory.q_full, sizeof(memory.q));
    copy_tile<D>(shared_address(memory.q), Cut::kRows * kPanelRowBytes, q_map, &memory.q_full,
                 block.head, block.q_begin + block.row0);
    ++item;
#pragma unroll 1
    for (int j = block.tiles - 1; j >= 0; --j, ++tile) {
      const uint32_t stage = tile % Cut::kStages;
      const uint32_t parity = (tile / Cut::kStages & 1) ^ 1;
      const int token = block.k_begin + j * Cut::kKeys;
      wait(&memory.k_free[stage], parity);
      arrive_expecting(&memory.k_full[stage], kTileBytes);
      copy_tile<D>(shared_address(memory.k[stage]), kPanelBytes, k_map, &memory.k_full[stage],
                   block.head_k, token);
      wait(&memory.v_free[stage], parity);
      arrive_expecting(&memory.v_full[stage], kTileBytes);
      copy_tile<D>(shared_address(memory.v[stage]), kPanelBytes, v_map, &memory.v_full[stage],
                   block.head_k, token);
    }
  }
}

// What a lane keeps of the online softmax of its two rows (l / 4 and l / 4 + 8).
struct Softmax {
  float scale;  // of the products, times log2 e: exponentials are powers of two
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};   // of this lane's columns
  float keep[2] = {0.0f, 0.0f};  // what the last update left of earlier sums

  // Scores become probabilities relative to the new maximum.
  template <int N>
  __device__ void update(float (&s)[N]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = max[half];
#pragma unroll
      for (int i = 0; i < N; i += 4) top = fmaxf(top, fmaxf(s[i + 2 * half], s[i + 2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float base = top == -INFINITY ? 0.0f : top * scale;
      keep[half] = exp2_fast(max[half] * scale - base);
      max[half] = top;
      float row_sum = 0.0f;
#pragma unroll
      for (int i = 0; i < N; i += 4) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[i + 2 * half + c];
          x = exp2_fast(fmaf(x, scale, -base));
          row_sum += x;
        }
      }
      sum[half] = fmaf(sum[half], keep[half], row_sum);
    }
  }
  template <int N>
  __device__ void rescale(float (&out)[N]) const {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      out[i] *= keep[0];
      out[i + 1] *= keep[0];
      out[i + 2] *= keep[1];
      out[i + 3] *= keep[1];
    }
  }
  __device__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
    }
  }
};

template <int D>
__device__ void consume(const AttentionArgs& a, ForwardMemory<D>& memory, int group,
                        int blocks_per_segment, int count) {
  using Cut = Forward<D>;
  constexpr int kKeys = Cut::kKeys;
  constexpr uint32_t kPanelBytes = kKeys * kPanelRowBytes;
  constexpr uint32_t kQueryPanelBytes = Cut::kRows * kPanelRowBytes;
  const int lane = threadIdx.x % 32;
  const int warp_row = group * 64 + threadIdx.x % kWarpgroup / 32 * 16;
  const uint32_t q_tile = shared_address(memory.q) + group * 64 * kPanelRowBytes;
  const auto release = [&](Barrier* barrier) {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  };
  // The warpgroups take turns at issuing products, so that one's softmax runs beside another's
  // products: barrier 1 + g is warpgroup g's turn.
  const auto await_turn = [&] { sync_named(1 + group, 2 * kWarpgroup); };
  const auto pass_turn = [&] {
    arrive_named(1 + (group + 1 == Cut::kConsumers ? 0 : group + 1), 2 * kWarpgroup);
  };
  if (group == Cut::kConsumers - 1) pass_turn();

  uint32_t tile = 0;
  uint32_t item = 0;
  for (int n = 0; nth_index(n, count) >= 0; ++n) {
    QueryBlock block;
    if (!block.find(a, nth_index(n, count), blocks_per_segment, Cut::kRows, kKeys)) continue;
    const int group_row = block.row0 + group * 64;
    // This warpgroup's queries may see fewer tiles than the block's last, or be none.
    const int tiles = group_row < block.q_count ? block.tiles_of(a, group_row + 64, kKeys) : 0;
    const auto stage_of = [](uint32_t t) { return t % Cut::kStages; };
    const auto parity_of = [](uint32_t t) { return t / Cut::kStages & 1; };
    Softmax softmax{.scale = a.scale * kLog2e};
    float out[D / 2] = {};
    if (block.tiles > 0) {
      wait(&memory.q_full, item & 1);
      ++item;
      for (int j = block.tiles; j > tiles; --j, ++tile) {
        await_turn();
        pass_turn();
        wait(&memory.k_full[stage_of(tile)], parity_of(tile));
        release(&memory.k_free[stage_of(tile)]);
        wait(&memory.v_full[stage_of(tile)], parity_of(tile));
        release(&memory.v_free[stage_of(tile)]);
      }
    }
    if (tiles > 0) {
      float s[kKeys / 2];
      uint32_t p[kKeys / 16][4];
      const auto multiply_keys = [&](uint32_t t) {
        multiply_rows<D, kKeys>(s, q_tile, kQueryPanelBytes, shared_address(memory.k[stage_of(t)]),
                                kPanelBytes);
      };
      const auto multiply_values = [&](uint32_t t) {
        multiply_columns<kKeys>(out, p, shared_address(memory.v[stage_of(t)]), kPanelBytes);
      };
      const auto mask = [&](int j) {
        // Columns from `end` on are hidden from the first row, from end1 on from the second.
        const int row = block.row0 + warp_row + lane / 4 + block.offset - j * kKeys;
        const int keys = block.k_count - j * kKeys;
        const int end0 = a.causal ? min(keys, row + 1) : keys;
        const int end1 = a.causal ? min(keys, row + 9) : keys;
#pragma unroll
        for (int i = 0; i < kKeys / 2; i += 4) {
          const int column = i * 2 + lane % 4 * 2;
          if (column >= end0) s[i] = -INFINITY;
          if (column + 1 >= end0) s[i + 1] = -INFINITY;
          if (column >= end1) s[i + 2] = -INFINITY;
          if (column + 1 >= end1) s[i + 3] = -INFINITY;
        }
      };
      // Tiles of keys below this one need no mask.
      const int visible =
          a.causal ? min(block.k_count, group_row + block.offset + 1) : block.k_count;
      const int unmasked = max(0, visible / kKeys);

      int j = tiles - 1;
      await_turn();
      wait(&memory.k_full[stage_of(tile)], parity_of(tile));
      multiply_keys(tile);
      pass_turn();
      wait_products<0>(s);
      release(&memory.k_free[stage_of(tile)]);
      if (j >= unmasked) mask(j);
      softmax.update(s);
      to_left(p, s);
      // Products of tile j + 1's probabilities and values run beside tile j's softmax.
      const auto step = [&](auto masked) {
        const uint32_t next = tile + 1;
        await_turn();
        wait(&memory.k_full[stage_of(next)], parity_of(next));
        multiply_keys(next);
        wait(&memory.v_full[stage_of(tile)], parity_of(tile));
        multiply_values(tile);
        pass_turn();
        wait_products<1>(s);
        release(&memory.k_free[stage_of(next)]);
        if constexpr (decltype(masked)::value) mask(j);
        softmax.update(s);
        wait_products<0>(out);
        release(&memory.v_free[stage_of(tile)]);
        softmax.rescale(out);
        to_left(p, s);
        tile = next;
      };
      for (--j; j >= unmasked; --j) step(std::true_type{});
      for (; j >= 0; --j) step(std::false_type{});
      release(&memory.q_free);
      wait(&memory.v_full[stage_of(tile)], parity_of(tile));
      multiply_values(tile);
      wait_products<0>(out);
      release(&memory.v_free[stage_of(tile)]);
      ++tile;
    } else if (block.tiles > 0) {
      release(&memory.q_free);
    }

    softmax.finish();
    const float factor0 = softmax.sum[0] > 0.0f ? 1.0f / softmax.sum[0] : 0.0f;
    const float factor1 = softmax.sum[1] > 0.0f ? 1.0f / softmax.sum[1] : 0.0f;
    if (lane % 4 < 2) {
      const int half = lane % 4;
      const int row = block.row0 + warp_row + 8 * half + lane / 4;
      const float sum = half == 0 ? softmax.sum[0] : softmax.sum[1];
      const float max = half == 0 ? softmax.max[0] : softmax.max[1];
      if (row < block.q_count) {
        a.lse[block.head * a.total_q + block.q_begin + row] =
            sum > 0.0f ? max * a.scale + logf(sum) : -INFINITY;
      }
    }
    bf16* to = static_cast<bf16*>(a.out.data) +
               static_cast<int64_t>(block.q_begin + block.row0) * a.out.row +
               block.head * a.out.head;
    store_rows<D>(out, factor0, factor1, shared_address(memory.out), kQueryPanelBytes, warp_row, to,
                  a.out.row, block.q_count - block.row0);
  }
}

template <int D>
__global__ void __launch_bounds__(Forward<D>::kThreads, 1)
    forward_kernel(const __grid_constant__ AttentionArgs a,
                   const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, int blocks_per_segment, int count) {
#if MUSTER_HOPPER_CODE
  using Cut = Forward<D>;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& memory = *reinterpret_cast<ForwardMemory<D>*>(shared);
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    prefetch_map(&q_map);
    prefetch_map(&k_map);
    prefetch_map(&v_map);
    init_barrier(&memory.q_full, 1);
    init_barrier(&memory.q_free, 4 * Cut::kConsumers);
    for (int i = 0; i < Cut::kStages; ++i) {
      init_barrier(&memory.k_full[i], 1);
      init_barrier(&memory.v_full[i], 1);
      init_barrier(&memory.k_free[i], 4 * Cut::kConsumers);
      init_barrier(&memory.v_free[i], 4 * Cut::kConsumers);
    }
    publish_barriers();
  }
  __syncthreads();
  if (group == 0) {
    give_registers<Cut::kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce<D>(a, memory, &q_map, &k_map, &v_map, blocks_per_segment, count);
    }
  } else {
    take_registers<Cut::kConsumerRegisters>();
    consume<D>(a, memory, group - 1, blocks_per_segment, count);
  }
#endif
}

template <int D>
void launch(const Stream& stream, const AttentionArgs& args) {
  using Cut = Forward<D>;
  const int blocks = static_cast<int>(ceil_div(args.max_q, Cut::kRows));
  const int count = blocks * args.segments * args.heads_q;
  if (count == 0) return;
  const CUtensorMap q = head_map(args.q, args.total_q, args.heads_q, D, Cut::kRows);
  const CUtensorMap k = head_map(args.k, args.total_k, args.heads_k, D, Cut::kKeys);
  const CUtensorMap v = head_map(args.v, args.total_k, args.heads_k, D, Cut::kKeys);
  constexpr int kBytes = sizeof(ForwardMemory<D>);
  CUDA_CHECK(
      cudaFuncSetAttribute(forward_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  forward_kernel<D>
      <<<std::min(count, multiprocessors()), Cut::kThreads, kBytes, handle_of(stream)>>>(
          args, q, k, v, blocks, count);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace hopper

bool hopper_available() {
  thread_local int known_device = -1;
  thread_local bool available = false;
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  if (device != known_device) {
    int major = 0;
    int minor = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    available = major == 9 && minor == 0;
    if (available) {
      // In a build without 90a in its architectures the kernels are empty, and need no registers.
      cudaFuncAttributes attributes{};
      CUDA_CHECK(cudaFuncGetAttributes(&attributes, hopper::forward_kernel<64>));
      available = attributes.numRegs > 64;
    }
    known_device = device;
  }
  return available;
}

void hopper_attention_forward(const Stream& stream, const AttentionArgs& args) {
  using namespace hopper;
  if (args.width == 64) {
    launch<64>(stream, args);
  } else {
    launch<128>(stream, args);
  }
}

}  // namespace muster::cuda
