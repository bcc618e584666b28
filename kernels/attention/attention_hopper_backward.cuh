// The pass of the Hopper attention backward over all pairs of tiles: what its threads do, and the
// shared and scratch memory they do it in. README.md of this folder has the schedule.
#pragma once

#include "kernels/attention/attention_hopper.cuh"

namespace muster::cuda::hopper {

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

template <int D>
constexpr int kQueries = D == 64 ? 128 : 64;  // of a step

// Blocks of keys and values in shared memory: with two, the next one's copies run beside the work.
template <int D>
constexpr int kKeyStages = D == 64 ? 2 : 1;

template <int D>
struct BackwardMemory {
  static constexpr int kTileBytes = kQueries<D> * D * 2;
  alignas(1024) unsigned char k[kKeyStages<D>][kKeys * D * 2];
  alignas(1024) unsigned char v[kKeyStages<D>][kKeys * D * 2];
  alignas(1024) unsigned char q[kStages][kTileBytes];
  alignas(1024) unsigned char o[kStages][kTileBytes];  // grad_out
  // dSᵀ: rows are keys, in panels of 64 queries.
  alignas(1024) unsigned char ds[kStages][kKeys * kQueries<D> * 2];
  alignas(1024) unsigned char dq[kConsumers][kBoxes][kBoxBytes];
  alignas(128) float statistics[kStages][2 * kQueries<D>];  // as in BackwardScratch
  int index[2];  // of blocks of keys, as the producer takes them
  Barrier index_full[2];
  Barrier index_free[2];
  Barrier kv_full[kKeyStages<D>];
  Barrier kv_free[kKeyStages<D>];
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
    const uint32_t key_stage = copies % kKeyStages<D>;
    wait(&memory.kv_free[key_stage], (copies / kKeyStages<D> & 1) ^ 1);
    ++copies;
    const int token_k = block.k_begin + block.key0;
    Barrier* full = &memory.kv_full[key_stage];
    arrive_expecting(full, 2 * kKeys * D * 2);
    copy_tile<D>(shared_address(memory.k[key_stage]), kKeys * kPanelRowBytes, &maps.k, full,
                 block.head_k, token_k);
    copy_tile<D>(shared_address(memory.v[key_stage]), kKeys * kPanelRowBytes, &maps.v, full,
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
  const uint32_t key_stage = copies % kKeyStages<D>;
  const uint32_t k_tile = shared_address(memory.k[key_stage]);
  const uint32_t v_tile = shared_address(memory.v[key_stage]);
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

  wait(&memory.kv_full[key_stage], copies / kKeyStages<D> & 1);
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
  release(&memory.kv_free[key_stage]);
  hand_over(grad_q, number + end);
}

template <int D>
__device__ void consume(const AttentionArgs& a, BackwardMemory<D>& memory, const KeyBlock& block,
                        int group, uint32_t copies, uint32_t number) {
  const int warp_row = threadIdx.x % kWarpgroup / 32 * 16;
  float grad_k[D / 2] = {};
  float grad_v[D / 2] = {};
  if (block.steps > 0) accumulate<D>(a, memory, block, group, copies, number, grad_k, grad_v);
  // The results go by way of the warpgroup's memory of dQ, once the last one has left it.
  wait(&memory.dq_free[group], ((number + block.steps) & 1) ^ 1);
  const uint32_t tile = shared_address(memory.dq[group]);
  const int rows = block.k_count - block.key0 - group * 64;
  const int64_t row = block.k_begin + block.key0 + group * 64;
  bf16* to_k =
      static_cast<bf16*>(a.grad_k.data) + row * a.grad_k.row + block.head_k * a.grad_k.head;
  bf16* to_v =
      static_cast<bf16*>(a.grad_v.data) + row * a.grad_v.row + block.head_k * a.grad_v.head;
  store_rows<D>(grad_k, a.scale, a.scale, tile, kBoxBytes, warp_row, to_k, a.grad_k.row, rows);
  store_rows<D>(grad_v, 1.0f, 1.0f, tile, kBoxBytes, warp_row, to_v, a.grad_v.row, rows);
}

}  // namespace muster::cuda::hopper
