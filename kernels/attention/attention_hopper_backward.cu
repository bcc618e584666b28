// Flash attention, backward, for Hopper (sm_90a), in one pass over the pairs of tiles that owns
// keys: their gradients stay in registers, those of the queries are added up in global memory.
// README.md of this folder has the schedule.
#include <algorithm>

#include "kernels/attention/attention_hopper.cuh"
#include "kernels/cuda/device.h"

namespace muster::cuda {
namespace hopper {

constexpr int kKeys = 128;  // of a block, 64 for each of two warpgroups

// Scratch memory. Tiles of queries of all segments are numbered with gaps: that of segment s which
// begins at query q0 of the segment is tile (cu_q[s] + s · rows + q0) / rows, for `rows` queries a
// tile.
struct BackwardScratch {
  // [Hq, tiles, 2, rows]: lse · log2 e and Σ_d grad_out · out; zero beyond a segment's end.
  float* statistics = nullptr;
  float* grad_q = nullptr;  // [Hq, Nq, D] sums, zero at first
  int* turns = nullptr;     // [Hq, tiles]: how many blocks of keys have added to grad_q; 0 at first
  int* next = nullptr;      // the next block of keys; 0 at first
  int64_t tiles = 0;
};

// What one block of threads does: a block of keys of one head, with all queries that see them.
struct KeyBlock {
  int segment = 0;
  int head_k = 0;
  int block = 0;
  int q_begin = 0;
  int q_count = 0;
  int k_begin = 0;
  int k_count = 0;
  int key0 = 0;
  int offset = 0;  // key j is seen by queries from j − offset on
  int tiles = 0;   // of queries that see a key
  int last_tile = 0;
  int steps = 0;

  // Blocks that many queries see come first; blocks of `units` heads at a time, so that what they
  // share stays in the L2 cache.
  __device__ bool find(const AttentionArgs& a, int index, int blocks_per_segment, int units,
                       int queries) {
    const int all_units = a.segments * a.heads_k;
    const int first_unit = index / (units * blocks_per_segment) * units;
    const int here = min(units, all_units - first_unit);
    const int rest = index - first_unit * blocks_per_segment;
    block = rest / here;
    const int unit = first_unit + rest % here;
    segment = unit / a.heads_k;
    head_k = unit % a.heads_k;
    q_begin = a.cu_q[segment];
    q_count = a.cu_q[segment + 1] - q_begin;
    k_begin = a.cu_k[segment];
    k_count = a.cu_k[segment + 1] - k_begin;
    key0 = block * kKeys;
    offset = k_count - q_count;
    const int first_tile = a.causal ? max(0, key0 - offset) / queries : 0;
    const int all_tiles = (q_count + queries - 1) / queries;
    tiles = max(0, all_tiles - first_tile);
    last_tile = all_tiles - 1;
    steps = tiles * (a.heads_q / a.heads_k);
    return key0 < k_count;
  }
  // A step's head and tile of queries, the last tile first: blocks of keys that run side by side
  // come to the same tile at about the same time.
  __device__ int head_of(const AttentionArgs& a, int step) const {
    return head_k * (a.heads_q / a.heads_k) + step / tiles;
  }
  __device__ int tile_of(int step) const { return last_tile - step % tiles; }
  // Of the step's tile of queries, in the scratch memory's order.
  __device__ int64_t place_of(const AttentionArgs& a, const BackwardScratch& scratch, int step,
                              int queries) const {
    return head_of(a, step) * scratch.tiles + q_begin / queries + segment + tile_of(step);
  }
};

constexpr int kConsumers = 2;
constexpr int kThreads = kWarpgroup * (kConsumers + 1);
constexpr int kStages = 2;
constexpr int kBoxRows = 64;  // of a box of dQ, which has 32 columns
constexpr int kBoxBytes = kBoxRows * 128;
constexpr int kBoxes = 2;  // of a warpgroup
constexpr int kConvertThreads = 256;

template <int D>
constexpr int kQueries = D == 64 ? 128 : 64;  // of a step

template <int D>
struct BackwardMemory {
  static constexpr int kTileBytes = kQueries<D> * D * 2;
  alignas(1024) unsigned char k[kKeys * D * 2];
  alignas(1024) unsigned char v[kKeys * D * 2];
  alignas(1024) unsigned char q[kStages][kTileBytes];
  alignas(1024) unsigned char o[kStages][kTileBytes];  // grad_out
  // dSᵀ: rows are keys, in panels of 64 queries.
  alignas(1024) unsigned char ds[kStages][kKeys * kQueries<D> * 2];
  alignas(1024) unsigned char dq[kConsumers][kBoxes][kBoxBytes];
  alignas(128) float statistics[kStages][2 * kQueries<D>];  // as in BackwardScratch
  int index[2];  // of blocks of keys, as the producer takes them
  Barrier index_full[2];
  Barrier index_free[2];
  Barrier kv_full;
  Barrier kv_free;
  Barrier q_full[kStages];  // with the statistics
  Barrier q_free[kStages];
  Barrier o_full[kStages];
  Barrier o_free[kStages];
  Barrier ds_full[kStages];
  Barrier ds_free[kStages];
  Barrier dq_full[kConsumers];
  Barrier dq_free[kConsumers];
};

struct BackwardMaps {
  CUtensorMap q, k, v, grad_out, grad_q;
};

// How the blocks of keys are numbered.
struct BackwardGrid {
  int blocks_per_segment = 0;
  int units = 0;
  int count = 0;
};

// Takes one block of keys after the other, in their order, and copies what they need.
template <int D>
__device__ void produce(const AttentionArgs& a, BackwardMemory<D>& memory, const BackwardMaps& maps,
                        const BackwardGrid& grid, const BackwardScratch& scratch) {
  constexpr int kRows = kQueries<D>;
  constexpr uint32_t kPanelBytes = kRows * kPanelRowBytes;
  constexpr uint32_t kTileBytes = BackwardMemory<D>::kTileBytes;
  constexpr uint32_t kStatisticsBytes = 2 * kRows * sizeof(float);
  uint32_t copies = 0;  // of keys and values
  uint32_t number = 0;  // of the step
#pragma unroll 1
  for (uint32_t item = 0;; ++item) {
    wait(&memory.index_free[item % 2], (item / 2 & 1) ^ 1);
    const int index = atomicAdd(scratch.next, 1);
    memory.index[item % 2] = index;
    arrive(&memory.index_full[item % 2]);
    if (index >= grid.count) return;
    KeyBlock block;
    if (!block.find(a, index, grid.blocks_per_segment, grid.units, kRows) || block.steps == 0) {
      continue;
    }
    wait(&memory.kv_free, (copies & 1) ^ 1);
    ++copies;
    const int token_k = block.k_begin + block.key0;
    arrive_expecting(&memory.kv_full, 2 * kKeys * D * 2);
    copy_tile<D>(shared_address(memory.k), kKeys * kPanelRowBytes, &maps.k, &memory.kv_full,
                 block.head_k, token_k);
    copy_tile<D>(shared_address(memory.v), kKeys * kPanelRowBytes, &maps.v, &memory.kv_full,
                 block.head_k, token_k);
#pragma unroll 1
    for (int step = 0; step < block.steps; ++step, ++number) {
      const uint32_t stage = number % kStages;
      const uint32_t parity = (number / kStages & 1) ^ 1;
      const int head = block.head_of(a, step);
      const int token = block.q_begin + block.tile_of(step) * kRows;
      wait(&memory.q_free[stage], parity);
      arrive_expecting(&memory.q_full[stage], kTileBytes + kStatisticsBytes);
      copy_tile<D>(shared_address(memory.q[stage]), kPanelBytes, &maps.q, &memory.q_full[stage],
                   head, token);
      copy_bytes(shared_address(memory.statistics[stage]),
                 scratch.statistics + block.place_of(a, scratch, step, kRows) * 2 * kRows,
                 kStatisticsBytes, &memory.q_full[stage]);
      wait(&memory.o_free[stage], parity);
      arrive_expecting(&memory.o_full[stage], kTileBytes);
      copy_tile<D>(shared_address(memory.o[stage]), kPanelBytes, &maps.grad_out,
                   &memory.o_full[stage], head, token);
    }
  }
}

// The blocks of keys that the producer took, for one thread (`thread`) or for a whole warp.
template <int D, typename F>
__device__ void for_each_block(const AttentionArgs& a, BackwardMemory<D>& memory,
                               const BackwardGrid& grid, bool thread, F work) {
#pragma unroll 1
  for (uint32_t item = 0;; ++item) {
    wait(&memory.index_full[item % 2], item / 2 & 1);
    const int index = memory.index[item % 2];
    if (!thread) __syncwarp();
    if (thread || threadIdx.x % 32 == 0) arrive(&memory.index_free[item % 2]);
    if (index >= grid.count) return;
    KeyBlock block;
    if (block.find(a, index, grid.blocks_per_segment, grid.units, kQueries<D>)) work(block);
  }
}

// Adds the steps' dQ to global memory, from step `number` of all on. When deterministic, blocks of
// keys take turns at a tile of queries, in their order: each waits only for blocks that were taken
// before it, which never wait for it.
template <int D, bool kDeterministic>
__device__ void add_grad_q(const AttentionArgs& a, BackwardMemory<D>& memory,
                           const BackwardMaps& maps, const KeyBlock& block,
                           const BackwardScratch& scratch, uint32_t number) {
  constexpr int kRows = kQueries<D>;
#pragma unroll 1
  for (int step = 0; step < block.steps; ++step, ++number) {
    const int head = block.head_of(a, step);
    const int tile = block.tile_of(step);
    int* turn = nullptr;
    if constexpr (kDeterministic) {
      turn = scratch.turns + block.place_of(a, scratch, step, kRows);
      int done = 0;
      do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(turn) : "memory");
      } while (done != block.block);
      asm volatile("fence.proxy.async.global;" ::: "memory");
    }
#pragma unroll
    for (int g = 0; g < kConsumers; ++g) {
      wait(&memory.dq_full[g], number & 1);
      // A warpgroup has 64 queries, or 64 columns where a step has no more queries.
      const int row = block.q_begin + tile * kRows + (D == 64 ? g * 64 : 0);
      const int column = D == 64 ? 0 : g * 64;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        add_box(&maps.grad_q, shared_address(memory.dq[g][box]), column + box * 32, row, head);
      }
      commit_adds();
    }
    wait_adds_read<1>();
    arrive(&memory.dq_free[0]);
    wait_adds_read<0>();
    arrive(&memory.dq_free[1]);
    if constexpr (kDeterministic) {
      wait_adds();
      asm volatile("fence.proxy.async.global;" ::: "memory");
      asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(block.block + 1)
                   : "memory");
    }
  }
}

// Products with 64 keys as rows and the step's queries as columns, so that Pᵀ and dSᵀ are left
// operands as they come. `copies` of keys and values and `number` steps came before this block's.
template <int D>
__device__ void accumulate(const AttentionArgs& a, BackwardMemory<D>& memory, const KeyBlock& block,
                           int group, uint32_t copies, uint32_t number, float (&grad_k)[D / 2],
                           float (&grad_v)[D / 2]) {
  constexpr int kRows = kQueries<D>;
  constexpr uint32_t kPanelBytes = kRows * kPanelRowBytes;
  constexpr uint32_t kKeyPanelBytes = kKeys * kPanelRowBytes;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x % kWarpgroup / 32;
  const int warp_row = group * 64 + warp * 16;
  const uint32_t k_tile = shared_address(memory.k);
  const uint32_t v_tile = shared_address(memory.v);
  const uint32_t group_rows = group * 64 * kPanelRowBytes;
  const float scale = a.scale * kLog2e;
  const auto release = [&](Barrier* barrier) {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  };

  // dQ's part of a step: the product of both warpgroups' dS with the keys. It follows a step later
  // than the step's other products, so that neither warpgroup waits for the other's dS.
  const auto multiply_queries = [&](float(&grad_q)[32], uint32_t n) {
    const uint32_t stage = n % kStages;
    // 64 queries of the step, or 64 columns where it has no more queries.
    const uint32_t left = shared_address(memory.ds[stage]) + (D == 64 ? group * kKeyPanelBytes : 0);
    const uint32_t right = k_tile + (D == 64 ? 0 : group * kKeyPanelBytes);
    wait(&memory.ds_full[stage], n / kStages & 1);
    pin(grad_q);
    begin_products();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const uint32_t row = k * 16 * kPanelRowBytes;
      multiply<true>(grad_q, column_operand(left + row, kKeyPanelBytes),
                     column_operand(right + row, kKeyPanelBytes), k > 0);
    }
    commit_products();
  };
  const auto hand_over = [&](const float(&grad_q)[32], uint32_t n) {
    release(&memory.ds_free[n % kStages]);
    wait(&memory.dq_free[group], (n & 1) ^ 1);
    // Row r of a box is 128 bytes; its chunk c of 4 columns lies at c ^ (r % 8).
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const int row = warp * 16 + i / 2 % 2 * 8 + lane / 4;
      const int column = i / 4 * 8 + lane % 4 * 2;
      unsigned char* box = memory.dq[group][column / 32];
      *reinterpret_cast<float2*>(box + row * 128 + ((column % 32 / 4 ^ (row & 7)) << 4) +
                                 column % 4 * 4) = {grad_q[i], grad_q[i + 1]};
    }
    fence_async_proxy();
    release(&memory.dq_full[group]);
  };

  float s[kRows / 2];
  const auto multiply_keys = [&](uint32_t n) {
    const uint32_t stage = n % kStages;
    wait(&memory.q_full[stage], n / kStages & 1);
    multiply_rows<D, kRows>(s, k_tile + group_rows, kKeyPanelBytes, shared_address(memory.q[stage]),
                            kPanelBytes);
  };
  // A step, with the products of the next step's keys and queries at its end, so that a product is
  // always under way. Only straight code, without branches around products, keeps the compiler
  // from waiting for each.
  const auto advance = [&](auto first, auto last, int step) {
    constexpr bool kFirst = decltype(first)::value;
    constexpr bool kLast = decltype(last)::value;
    const uint32_t n = number + step;
    const uint32_t stage = n % kStages;
    const uint32_t parity = n / kStages & 1;
    const uint32_t q_tile = shared_address(memory.q[stage]);
    const uint32_t o_tile = shared_address(memory.o[stage]);
    const float* statistics = memory.statistics[stage];
    float dp[kRows / 2];
    wait(&memory.o_full[stage], parity);
    multiply_rows<D, kRows>(dp, v_tile + group_rows, kKeyPanelBytes, o_tile, kPanelBytes);

#pragma unroll
    for (int i = 0; i < kRows / 2; i += 4) {
      const float2 lse = *reinterpret_cast<const float2*>(&statistics[i * 2 + lane % 4 * 2]);
      s[i] = exp2_fast(fmaf(s[i], scale, -lse.x));
      s[i + 1] = exp2_fast(fmaf(s[i + 1], scale, -lse.y));
      s[i + 2] = exp2_fast(fmaf(s[i + 2], scale, -lse.x));
      s[i + 3] = exp2_fast(fmaf(s[i + 3], scale, -lse.y));
    }
    const int row0 = block.tile_of(step) * kRows;
    const int first_key = block.key0 + group * 64;
    // Rows beyond a segment's end hold other segments' data.
    if (row0 + kRows > block.q_count || first_key + 64 > block.k_count ||
        (a.causal && first_key + 63 > row0 + block.offset)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = block.key0 + warp_row + 8 * half + lane / 4;
        // Columns [begin, end) see the key.
        const int begin = a.causal ? key - block.offset - row0 : 0;
        const int end = key < block.k_count ? block.q_count - row0 : 0;
#pragma unroll
        for (int i = 0; i < kRows / 2; i += 4) {
          const int column = i * 2 + lane % 4 * 2;
          if (column < begin || column >= end) s[i + 2 * half] = 0.0f;
          if (column + 1 < begin || column + 1 >= end) s[i + 2 * half + 1] = 0.0f;
        }
      }
    }
    wait_products<0>(dp);
    uint32_t p_left[kRows / 16][4];
    uint32_t ds_left[kRows / 16][4];
    to_left(p_left, s);
#pragma unroll
    for (int i = 0; i < kRows / 2; i += 4) {
      const float2 delta =
          *reinterpret_cast<const float2*>(&statistics[kRows + i * 2 + lane % 4 * 2]);
      dp[i] = s[i] * (dp[i] - delta.x);
      dp[i + 1] = s[i + 1] * (dp[i + 1] - delta.y);
      dp[i + 2] = s[i + 2] * (dp[i + 2] - delta.x);
      dp[i + 3] = s[i + 3] * (dp[i + 3] - delta.y);
    }
    to_left(ds_left, dp);
    wait(&memory.ds_free[stage], parity ^ 1);
    store_left(ds_left, shared_address(memory.ds[stage]), kKeyPanelBytes, warp_row);
    fence_async_proxy();
    multiply_columns<kRows>(grad_v, p_left, o_tile, kPanelBytes);
    release(&memory.ds_full[stage]);

    float grad_q[32];
    if constexpr (!kFirst) multiply_queries(grad_q, n - 1);
    multiply_columns<kRows>(grad_k, ds_left, q_tile, kPanelBytes);
    wait_products<kFirst ? 1 : 2>(grad_v, p_left);
    release(&memory.o_free[stage]);
    if constexpr (!kLast) multiply_keys(n + 1);
    if constexpr (!kFirst) {
      wait_products<kLast ? 1 : 2>(grad_q);
      hand_over(grad_q, n - 1);
    }
    // A product under way at the end of a loop's body would make the compiler wait for each.
    wait_products<0>(grad_k, ds_left, s);
    release(&memory.q_free[stage]);
  };

  wait(&memory.kv_full, copies & 1);
  multiply_keys(number);
  wait_products<0>(s);
  const int end = block.steps - 1;
  if (end == 0) {
    advance(std::true_type{}, std::true_type{}, 0);
  } else {
    advance(std::true_type{}, std::false_type{}, 0);
    for (int step = 1; step < end; ++step) advance(std::false_type{}, std::false_type{}, step);
    advance(std::false_type{}, std::true_type{}, end);
  }
  float grad_q[32];
  multiply_queries(grad_q, number + end);
  wait_products<0>(grad_q);
  release(&memory.kv_free);
  hand_over(grad_q, number + end);
}

template <int D>
__device__ void consume(const AttentionArgs& a, BackwardMemory<D>& memory, const KeyBlock& block,
                        int group, uint32_t copies, uint32_t number) {
  constexpr uint32_t kKeyPanelBytes = kKeys * kPanelRowBytes;
  const int warp_row = group * 64 + threadIdx.x % kWarpgroup / 32 * 16;
  float grad_k[D / 2] = {};
  float grad_v[D / 2] = {};
  if (block.steps > 0) accumulate<D>(a, memory, block, group, copies, number, grad_k, grad_v);
  // Behind the barrier, the other warpgroup's products have read the memory of dS, which now takes
  // the results on their way.
  sync_named(1, kConsumers * kWarpgroup);
  const uint32_t tile = shared_address(memory.ds);
  const int rows = block.k_count - block.key0;
  const int64_t row = block.k_begin + block.key0;
  bf16* to_k =
      static_cast<bf16*>(a.grad_k.data) + row * a.grad_k.row + block.head_k * a.grad_k.head;
  bf16* to_v =
      static_cast<bf16*>(a.grad_v.data) + row * a.grad_v.row + block.head_k * a.grad_v.head;
  store_rows<D>(grad_k, a.scale, a.scale, tile, kKeyPanelBytes, warp_row, to_k, a.grad_k.row, rows);
  store_rows<D>(grad_v, 1.0f, 1.0f, tile, kKeyPanelBytes, warp_row, to_v, a.grad_v.row, rows);
}

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
    init_barrier(&memory.kv_full, 1);
    init_barrier(&memory.kv_free, 4 * kConsumers);
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
