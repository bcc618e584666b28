// Flash attention, backward, in two passes that both recompute the probabilities from lse: one owns
// keys and sums their gradients over all queries (of all query heads of the group), the other owns
// queries. Seven products instead of the five of a single pass, but every sum has one owner and a
// fixed order: no atomics, the same bits in every run.
#include "kernels/attention/attention_mma.cuh"

namespace muster::cuda {
namespace {

// ---------------------------------------------------------------- keys

// kTiles · 16 keys a warp; the products have keys as rows and queries as columns, so that Pᵀ and
// dSᵀ are left operands as they come.
template <int D>
struct KeyPass {
  static constexpr int kWarps = D == 64 ? 4 : 8;
  static constexpr int kTiles = D == 64 ? 2 : 1;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeys = 16 * kTiles * kWarps;
  static constexpr int kQueries = D == 64 ? 32 : 64;
  static constexpr int kColumns = kQueries / 8;
  static constexpr int kTileBytes = kQueries * D * 2;
  static constexpr int kStatsBytes = 2 * kQueries * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes = 2 * kKeys * D * 2 + 4 * kTileBytes + 2 * kStatsBytes;
};

template <int D>
__global__ void __launch_bounds__(KeyPass<D>::kThreads, D == 64 ? 2 : 1)
    key_kernel(const __grid_constant__ AttentionArgs a, int blocks_per_segment) {
  using P = KeyPass<D>;
  constexpr int kTiles = P::kTiles;
  constexpr int kColumns = P::kColumns;
  extern __shared__ __align__(128) unsigned char shared[];
  const int segment = blockIdx.x / blocks_per_segment;
  const int key0 = blockIdx.x % blocks_per_segment * P::kKeys;
  const int q_begin = a.cu_q[segment];
  const int q_count = a.cu_q[segment + 1] - q_begin;
  const int k_begin = a.cu_k[segment];
  const int k_count = a.cu_k[segment + 1] - k_begin;
  if (key0 >= k_count) return;
  const int head_k = blockIdx.y;
  const int group = a.heads_q / a.heads_k;
  const int offset = k_count - q_count;  // key j is seen by queries from j − offset on
  const int first_query = a.causal ? max(0, key0 - offset) : 0;
  const int first_block = first_query / P::kQueries;
  const int blocks = max(0, (q_count + P::kQueries - 1) / P::kQueries - first_block);
  const int steps = blocks * group;

  unsigned char* k_memory = shared;
  unsigned char* v_memory = k_memory + P::kKeys * D * 2;
  unsigned char* q_memory = v_memory + P::kKeys * D * 2;
  unsigned char* o_memory = q_memory + 2 * P::kTileBytes;
  auto* stats = reinterpret_cast<float*>(o_memory + 2 * P::kTileBytes);
  const uint32_t k_tile = shared_address(k_memory);
  const uint32_t v_tile = shared_address(v_memory);
  const uint32_t q_tiles = shared_address(q_memory);
  const uint32_t o_tiles = shared_address(o_memory);

  const auto load_queries = [&](int step) {
    const int head = head_k * group + step / blocks;
    const int row0 = (first_block + step % blocks) * P::kQueries;
    const int stage = step & 1;
    const int64_t row = q_begin + row0;
    const bf16* q = static_cast<const bf16*>(a.q.data) + row * a.q.row + head * a.q.head;
    const bf16* o =
        static_cast<const bf16*>(a.grad_out.data) + row * a.grad_out.row + head * a.grad_out.head;
    load_tile<P::kQueries, D, P::kThreads>(q_tiles + stage * P::kTileBytes, q, a.q.row,
                                           q_count - row0, a.width);
    load_tile<P::kQueries, D, P::kThreads>(o_tiles + stage * P::kTileBytes, o, a.grad_out.row,
                                           q_count - row0, a.width);
    if (threadIdx.x < 2 * P::kQueries) {
      const int i = threadIdx.x % P::kQueries;
      const float* from = threadIdx.x < P::kQueries ? a.lse : a.delta;
      const bool valid = row0 + i < q_count;
      copy4_async(shared_address(stats + stage * 2 * P::kQueries + threadIdx.x),
                  from + (valid ? head * a.total_q + row + i : 0), valid);
    }
  };
  const bf16* k =
      static_cast<const bf16*>(a.k.data) + (k_begin + key0) * a.k.row + head_k * a.k.head;
  const bf16* v =
      static_cast<const bf16*>(a.v.data) + (k_begin + key0) * a.v.row + head_k * a.v.head;
  load_tile<P::kKeys, D, P::kThreads>(k_tile, k, a.k.row, k_count - key0, a.width);
  load_tile<P::kKeys, D, P::kThreads>(v_tile, v, a.v.row, k_count - key0, a.width);
  if (steps > 0) load_queries(0);
  commit_copies();

  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * 16 * kTiles;
  const float scale = a.scale * kLog2e;
  float grad_k[kTiles][D / 8][4] = {};
  float grad_v[kTiles][D / 8][4] = {};
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) load_queries(step + 1);
    commit_copies();
    wait_copies<1>();
    __syncthreads();
    const int row0 = (first_block + step % blocks) * P::kQueries;
    const uint32_t q_tile = q_tiles + (step & 1) * P::kTileBytes;
    const uint32_t o_tile = o_tiles + (step & 1) * P::kTileBytes;
    const float* lse = stats + (step & 1) * 2 * P::kQueries;
    const float* delta = lse + P::kQueries;
    float s[kTiles][kColumns][4];
    multiply_rows<D>(s, k_tile, warp_row, q_tile);
    // Queries beyond the segment have zero rows and statistics and add exactly zero; keys beyond it
    // are not stored. Only causality needs a mask.
    const bool masked = a.causal && key0 + warp_row + 16 * kTiles - 1 > row0 + offset;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const float2 l = *reinterpret_cast<const float2*>(lse + 8 * n + lane % 4 * 2);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float p = exp2_fast(fmaf(s[t][n][i], scale, -kLog2e * (i % 2 == 0 ? l.x : l.y)));
          const int key = key0 + warp_row + 16 * t + i / 2 * 8 + lane / 4;
          const int query = row0 + 8 * n + lane % 4 * 2 + i % 2;
          s[t][n][i] = masked && key > query + offset ? 0.0f : p;
        }
      }
    }
    multiply_columns<D>(grad_v, s, o_tile);
    float dp[kTiles][kColumns][4];
    multiply_rows<D>(dp, v_tile, warp_row, o_tile);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const float2 d = *reinterpret_cast<const float2*>(delta + 8 * n + lane % 4 * 2);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[t][n][i] *= dp[t][n][i] - (i % 2 == 0 ? d.x : d.y);
      }
    }
    multiply_columns<D>(grad_k, s, q_tile);
    __syncthreads();  // the stage may be overwritten
  }
  wait_copies<0>();
  __syncthreads();

  float one[kTiles][2];
  float scales[kTiles][2];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    one[t][0] = one[t][1] = 1.0f;
    scales[t][0] = scales[t][1] = a.scale;
  }
  const int64_t row = k_begin + key0;
  bf16* to_k = static_cast<bf16*>(a.grad_k.data) + row * a.grad_k.row + head_k * a.grad_k.head;
  bf16* to_v = static_cast<bf16*>(a.grad_v.data) + row * a.grad_v.row + head_k * a.grad_v.head;
  store_rows<D>(grad_k, scales, k_memory, warp_row, to_k, a.grad_k.row, k_count - key0, a.width);
  store_rows<D>(grad_v, one, v_memory, warp_row, to_v, a.grad_v.row, k_count - key0, a.width);
}

// ---------------------------------------------------------------- queries

template <int D>
struct QueryPass {
  static constexpr int kWarps = 4;
  static constexpr int kTiles = 2;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kTiles * kWarps;
  static constexpr int kKeys = D == 64 ? 64 : 32;
  static constexpr int kColumns = kKeys / 8;
  static constexpr int kTileBytes = kKeys * D * 2;
  static constexpr int kSharedBytes = 2 * kRows * D * 2 + 4 * kTileBytes;
};

template <int D>
__global__ void __launch_bounds__(QueryPass<D>::kThreads, 2)
    query_kernel(const __grid_constant__ AttentionArgs a, int blocks_per_segment) {
  using P = QueryPass<D>;
  constexpr int kTiles = P::kTiles;
  constexpr int kColumns = P::kColumns;
  extern __shared__ __align__(128) unsigned char shared[];
  const int segment = blockIdx.x / blocks_per_segment;
  const int block = blocks_per_segment - 1 - blockIdx.x % blocks_per_segment;
  const int q_begin = a.cu_q[segment];
  const int q_count = a.cu_q[segment + 1] - q_begin;
  const int k_begin = a.cu_k[segment];
  const int k_count = a.cu_k[segment + 1] - k_begin;
  const int row0 = block * P::kRows;
  if (row0 >= q_count) return;
  const int head = blockIdx.y;
  const int head_k = head / (a.heads_q / a.heads_k);
  const int offset = k_count - q_count;
  const int keys_end = a.causal ? min(k_count, row0 + P::kRows + offset) : k_count;
  const int blocks = keys_end > 0 ? (keys_end + P::kKeys - 1) / P::kKeys : 0;

  const uint32_t q_tile = shared_address(shared);
  const uint32_t o_tile = q_tile + P::kRows * D * 2;
  const uint32_t k_tiles = o_tile + P::kRows * D * 2;
  const uint32_t v_tiles = k_tiles + 2 * P::kTileBytes;
  const int64_t first = q_begin + row0;
  const bf16* q = static_cast<const bf16*>(a.q.data) + first * a.q.row + head * a.q.head;
  const bf16* o =
      static_cast<const bf16*>(a.grad_out.data) + first * a.grad_out.row + head * a.grad_out.head;
  const bf16* k = static_cast<const bf16*>(a.k.data) + k_begin * a.k.row + head_k * a.k.head;
  const bf16* v = static_cast<const bf16*>(a.v.data) + k_begin * a.v.row + head_k * a.v.head;
  const auto load_keys = [&](int j) {
    const int key0 = j * P::kKeys;
    const int stage = (j & 1) * P::kTileBytes;
    load_tile<P::kKeys, D, P::kThreads>(k_tiles + stage, k + key0 * a.k.row, a.k.row,
                                        k_count - key0, a.width);
    load_tile<P::kKeys, D, P::kThreads>(v_tiles + stage, v + key0 * a.v.row, a.v.row,
                                        k_count - key0, a.width);
  };
  load_tile<P::kRows, D, P::kThreads>(q_tile, q, a.q.row, q_count - row0, a.width);
  load_tile<P::kRows, D, P::kThreads>(o_tile, o, a.grad_out.row, q_count - row0, a.width);
  if (blocks > 0) load_keys(0);
  commit_copies();

  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * 16 * kTiles;
  const float scale = a.scale * kLog2e;
  float grad_q[kTiles][D / 8][4] = {};
  float lse[kTiles][2];
  float delta[kTiles][2];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 16 * t + 8 * half + lane / 4;
      const bool valid = row0 + row < q_count;
      const int64_t at = head * a.total_q + first + row;
      const float value = valid ? a.lse[at] : 0.0f;
      lse[t][half] = value == -INFINITY ? 0.0f : value * kLog2e;  // a row without keys is masked
      delta[t][half] = valid ? a.delta[at] : 0.0f;
    }
  }
  for (int j = 0; j < blocks; ++j) {
    if (j + 1 < blocks) load_keys(j + 1);
    commit_copies();
    wait_copies<1>();
    __syncthreads();
    const int key0 = j * P::kKeys;
    const uint32_t k_tile = k_tiles + (j & 1) * P::kTileBytes;
    const uint32_t v_tile = v_tiles + (j & 1) * P::kTileBytes;
    if (!a.causal || key0 <= row0 + warp_row + 16 * kTiles - 1 + offset) {
      float s[kTiles][kColumns][4];
      float dp[kTiles][kColumns][4];
      multiply_rows<D>(s, q_tile, warp_row, k_tile);
      multiply_rows<D>(dp, o_tile, warp_row, v_tile);
      const bool masked =
          key0 + P::kKeys > k_count || (a.causal && key0 + P::kKeys - 1 > row0 + warp_row + offset);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float p = exp2_fast(fmaf(s[t][n][i], scale, -lse[t][i / 2]));
            const int key = key0 + 8 * n + lane % 4 * 2 + i % 2;
            const int row = row0 + warp_row + 16 * t + i / 2 * 8 + lane / 4;
            const bool hidden = masked && (key >= k_count || (a.causal && key > row + offset));
            s[t][n][i] = hidden ? 0.0f : p * (dp[t][n][i] - delta[t][i / 2]);
          }
        }
      }
      multiply_columns<D>(grad_q, s, k_tile);
    }
    __syncthreads();  // the stage may be overwritten
  }
  wait_copies<0>();
  __syncthreads();

  float scales[kTiles][2];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) scales[t][0] = scales[t][1] = a.scale;
  bf16* to = static_cast<bf16*>(a.grad_q.data) + first * a.grad_q.row + head * a.grad_q.head;
  store_rows<D>(grad_q, scales, shared, warp_row, to, a.grad_q.row, q_count - row0, a.width);
}

template <int D>
void launch(const Stream& stream, const AttentionArgs& args) {
  const auto run = [&](auto kernel, int rows, int block_rows, int heads, int threads, int bytes) {
    const int blocks = static_cast<int>(ceil_div(rows, block_rows));
    if (blocks == 0) return;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    const dim3 grid(static_cast<unsigned>(blocks * args.segments), heads);
    kernel<<<grid, threads, bytes, handle_of(stream)>>>(args, blocks);
    CUDA_CHECK(cudaGetLastError());
  };
  using K = KeyPass<D>;
  using Q = QueryPass<D>;
  run(key_kernel<D>, args.max_k, K::kKeys, args.heads_k, K::kThreads, K::kSharedBytes);
  run(query_kernel<D>, args.max_q, Q::kRows, args.heads_q, Q::kThreads, Q::kSharedBytes);
}

}  // namespace

void mma_attention_backward(const Stream& stream, const AttentionArgs& args) {
  if (args.width <= 64) {
    launch<64>(stream, args);
  } else {
    launch<128>(stream, args);
  }
}

}  // namespace muster::cuda
