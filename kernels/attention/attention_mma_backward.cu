// Flash attention, backward, in two passes that both recompute the probabilities from lse: one owns
// keys and sums their gradients over all queries (of all query heads of the group), the other owns
// queries. Seven products instead of the five of a single pass, but every sum has one owner and a
// fixed order: no atomics, the same bits in every run.
#include "kernels/attention/attention_mma.cuh"

namespace muster::cuda {
namespace {

// ---------------------------------------------------------------- keys

// The products have keys as rows and queries as columns, so that Pᵀ and dSᵀ are left operands as
// they come.
template <int D>
struct KeyPass;
template <>
struct KeyPass<64> : Cut<4, 1, 64, true, 2> {};
template <>
struct KeyPass<128> : Cut<4, 1, 64, false, 2> {};

template <int D>
constexpr int kKeySharedBytes = (2 * KeyPass<D>::kRows + 4 * KeyPass<D>::kColumns) * D * 2 +
                                4 * KeyPass<D>::kColumns* static_cast<int>(sizeof(float));

template <typename T, int D, bool kLeft>
__global__ void __launch_bounds__(KeyPass<D>::kThreads, KeyPass<D>::kBlocks)
    key_kernel(const __grid_constant__ AttentionArgs a, int blocks_per_segment) {
  constexpr int kTiles = KeyPass<D>::kTiles;
  constexpr int kThreads = KeyPass<D>::kThreads;
  constexpr int kKeys = KeyPass<D>::kRows;
  constexpr int kQueries = KeyPass<D>::kColumns;
  constexpr int kColumns = kQueries / 8;
  constexpr int kTileBytes = kQueries * D * 2;
  extern __shared__ __align__(128) unsigned char shared[];
  const int segment = blockIdx.x / blocks_per_segment;
  const int key0 = blockIdx.x % blocks_per_segment * kKeys;
  const int q_begin = a.cu_q[segment];
  const int q_count = a.cu_q[segment + 1] - q_begin;
  const int k_begin = a.cu_k[segment];
  const int k_count = a.cu_k[segment + 1] - k_begin;
  if (key0 >= k_count) return;
  const int head_k = blockIdx.y;
  const int group = a.heads_q / a.heads_k;
  const int offset = k_count - q_count;  // query i lies at key i + offset
  const int first_block = max(0, key0 - offset - a.right) / kQueries;
  const int queries_end = kLeft ? max(0, min(q_count, key0 + kKeys - offset + a.left)) : q_count;
  const int blocks = max(0, (queries_end + kQueries - 1) / kQueries - first_block);
  const int steps = blocks * group;

  unsigned char* k_memory = shared;
  unsigned char* v_memory = k_memory + kKeys * D * 2;
  unsigned char* q_memory = v_memory + kKeys * D * 2;
  unsigned char* o_memory = q_memory + 2 * kTileBytes;
  auto* stats = reinterpret_cast<float*>(o_memory + 2 * kTileBytes);
  const uint32_t k_tile = shared_address(k_memory);
  const uint32_t v_tile = shared_address(v_memory);
  const uint32_t q_tiles = shared_address(q_memory);
  const uint32_t o_tiles = shared_address(o_memory);

  const auto load_queries = [&](int step) {
    const int head = head_k * group + step / blocks;
    const int row0 = (first_block + step % blocks) * kQueries;
    const int stage = step & 1;
    const int64_t row = q_begin + row0;
    const T* q = static_cast<const T*>(a.q.data) + row * a.q.row + head * a.q.head;
    const T* o =
        static_cast<const T*>(a.grad_out.data) + row * a.grad_out.row + head * a.grad_out.head;
    load_tile<kQueries, D, kThreads>(q_tiles + stage * kTileBytes, q, a.q.row, q_count - row0,
                                     a.width);
    load_tile<kQueries, D, kThreads>(o_tiles + stage * kTileBytes, o, a.grad_out.row,
                                     q_count - row0, a.width);
    if (threadIdx.x < 2 * kQueries) {
      const int i = threadIdx.x % kQueries;
      const float* from = threadIdx.x < kQueries ? a.lse : a.delta;
      const bool valid = row0 + i < q_count;
      copy4_async(shared_address(stats + stage * 2 * kQueries + threadIdx.x),
                  from + (valid ? head * a.total_q + row + i : 0), valid);
    }
  };
  const T* k = static_cast<const T*>(a.k.data) + (k_begin + key0) * a.k.row + head_k * a.k.head;
  const T* v = static_cast<const T*>(a.v.data) + (k_begin + key0) * a.v.row + head_k * a.v.head;
  load_tile<kKeys, D, kThreads>(k_tile, k, a.k.row, k_count - key0, a.width);
  load_tile<kKeys, D, kThreads>(v_tile, v, a.v.row, k_count - key0, a.width);
  commit_copies();
  if (steps > 0) load_queries(0);
  commit_copies();

  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * 16 * kTiles;
  const float scale = a.scale * kLog2e;
  wait_copies<1>();
  __syncthreads();
  const LeftRows<D, kTiles, KeyPass<D>::kHeld> keys(k_tile, warp_row);
  const LeftRows<D, kTiles, KeyPass<D>::kHeld> values(v_tile, warp_row);
  float grad_k[kTiles][D / 8][4] = {};
  float grad_v[kTiles][D / 8][4] = {};
  for (int step = 0; step < steps; ++step) {
    // Behind the barrier, everybody's copies have arrived and nobody reads the other stage any
    // more.
    wait_copies<0>();
    __syncthreads();
    if (step + 1 < steps) load_queries(step + 1);
    commit_copies();
    const int row0 = (first_block + step % blocks) * kQueries;
    const uint32_t q_tile = q_tiles + (step & 1) * kTileBytes;
    const uint32_t o_tile = o_tiles + (step & 1) * kTileBytes;
    const float* lse = stats + (step & 1) * 2 * kQueries;
    const float* delta = lse + kQueries;
    float s[kTiles][kColumns][4];
    multiply_rows<T>(s, keys, q_tile);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const float2 l = *reinterpret_cast<const float2*>(lse + 8 * n + lane % 4 * 2);
      const float2 base = {l.x * -kLog2e, l.y * -kLog2e};
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[t][n][i] = exp2_fast(fmaf(s[t][n][i], scale, i % 2 == 0 ? base.x : base.y));
        }
      }
    }
    // Queries beyond the segment have zero rows and statistics and add exactly zero; keys beyond it
    // are not stored. Only the edges of what is seen need a mask.
    if (!sees_all<kLeft>(a, row0, kQueries, key0 + warp_row, 16 * kTiles, offset)) {
      const SeenDiagonals<kLeft> seen(a, row0 + lane % 4 * 2, key0 + warp_row + lane / 4, offset);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (!seen.sees(16 * t + i / 2 * 8 - 8 * n - i % 2)) s[t][n][i] = 0.0f;
          }
        }
      }
    }
    multiply_columns<T, D>(grad_v, s, o_tile);
    float dp[kTiles][kColumns][4];
    multiply_rows<T>(dp, values, o_tile);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const float2 d = *reinterpret_cast<const float2*>(delta + 8 * n + lane % 4 * 2);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[t][n][i] *= dp[t][n][i] - (i % 2 == 0 ? d.x : d.y);
      }
    }
    multiply_columns<T, D>(grad_k, s, q_tile);
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
  T* to_k = static_cast<T*>(a.grad_k.data) + row * a.grad_k.row + head_k * a.grad_k.head;
  T* to_v = static_cast<T*>(a.grad_v.data) + row * a.grad_v.row + head_k * a.grad_v.head;
  store_rows<D>(grad_k, scales, k_memory, warp_row, to_k, a.grad_k.row, k_count - key0, a.width);
  store_rows<D>(grad_v, one, v_memory, warp_row, to_v, a.grad_v.row, k_count - key0, a.width);
}

// ---------------------------------------------------------------- queries

template <int D>
struct QueryPass;
template <>
struct QueryPass<64> : Cut<8, 1, 64, false, 2> {};
template <>
struct QueryPass<128> : Cut<4, 2, 32, false, 2> {};

template <int D>
constexpr int kQuerySharedBytes = (2 * QueryPass<D>::kRows + 4 * QueryPass<D>::kColumns) * D * 2;

template <typename T, int D, bool kLeft>
__global__ void __launch_bounds__(QueryPass<D>::kThreads, QueryPass<D>::kBlocks)
    query_kernel(const __grid_constant__ AttentionArgs a, int blocks_per_segment) {
  constexpr int kTiles = QueryPass<D>::kTiles;
  constexpr int kThreads = QueryPass<D>::kThreads;
  constexpr int kRows = QueryPass<D>::kRows;
  constexpr int kKeys = QueryPass<D>::kColumns;
  constexpr int kColumns = kKeys / 8;
  constexpr int kTileBytes = kKeys * D * 2;
  extern __shared__ __align__(128) unsigned char shared[];
  const int segment = blockIdx.x / blocks_per_segment;
  const int block = blocks_per_segment - 1 - blockIdx.x % blocks_per_segment;
  const int q_begin = a.cu_q[segment];
  const int q_count = a.cu_q[segment + 1] - q_begin;
  const int k_begin = a.cu_k[segment];
  const int k_count = a.cu_k[segment + 1] - k_begin;
  const int row0 = block * kRows;
  if (row0 >= q_count) return;
  const int head = blockIdx.y;
  const int head_k = head / (a.heads_q / a.heads_k);
  const int offset = k_count - q_count;
  const int keys_end = min(k_count, row0 + kRows + offset + a.right);
  const int first_block = kLeft ? max(0, row0 + offset - a.left) / kKeys : 0;
  const int blocks = keys_end > 0 ? (keys_end + kKeys - 1) / kKeys : 0;

  const uint32_t q_tile = shared_address(shared);
  const uint32_t o_tile = q_tile + kRows * D * 2;
  const uint32_t k_tiles = o_tile + kRows * D * 2;
  const uint32_t v_tiles = k_tiles + 2 * kTileBytes;
  const int64_t first = q_begin + row0;
  const T* q = static_cast<const T*>(a.q.data) + first * a.q.row + head * a.q.head;
  const T* o =
      static_cast<const T*>(a.grad_out.data) + first * a.grad_out.row + head * a.grad_out.head;
  const T* k = static_cast<const T*>(a.k.data) + k_begin * a.k.row + head_k * a.k.head;
  const T* v = static_cast<const T*>(a.v.data) + k_begin * a.v.row + head_k * a.v.head;
  const auto load_keys = [&](int j) {
    const int key0 = j * kKeys;
    const int stage = (j & 1) * kTileBytes;
    load_tile<kKeys, D, kThreads>(k_tiles + stage, k + key0 * a.k.row, a.k.row, k_count - key0,
                                  a.width);
    load_tile<kKeys, D, kThreads>(v_tiles + stage, v + key0 * a.v.row, a.v.row, k_count - key0,
                                  a.width);
  };
  load_tile<kRows, D, kThreads>(q_tile, q, a.q.row, q_count - row0, a.width);
  load_tile<kRows, D, kThreads>(o_tile, o, a.grad_out.row, q_count - row0, a.width);
  commit_copies();
  if (first_block < blocks) load_keys(first_block);
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
  wait_copies<1>();
  __syncthreads();
  const LeftRows<D, kTiles, QueryPass<D>::kHeld> queries(q_tile, warp_row);
  const LeftRows<D, kTiles, QueryPass<D>::kHeld> grads(o_tile, warp_row);
  for (int j = first_block; j < blocks; ++j) {
    wait_copies<0>();
    __syncthreads();
    if (j + 1 < blocks) load_keys(j + 1);
    commit_copies();
    const int key0 = j * kKeys;
    const uint32_t k_tile = k_tiles + (j & 1) * kTileBytes;
    const uint32_t v_tile = v_tiles + (j & 1) * kTileBytes;
    if (sees_any<kLeft>(a, row0 + warp_row, 16 * kTiles, key0, kKeys, offset)) {
      float s[kTiles][kColumns][4];
      float dp[kTiles][kColumns][4];
      multiply_rows<T>(s, queries, k_tile);
      multiply_rows<T>(dp, grads, v_tile);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float p = exp2_fast(fmaf(s[t][n][i], scale, -lse[t][i / 2]));
            s[t][n][i] = p * (dp[t][n][i] - delta[t][i / 2]);
          }
        }
      }
      if (key0 + kKeys > k_count ||
          !sees_all<kLeft>(a, row0 + warp_row, 16 * kTiles, key0, kKeys, offset)) {
        const int key = key0 + lane % 4 * 2;
        const SeenDiagonals<kLeft> seen(a, row0 + warp_row + lane / 4, key, offset);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int column = 8 * n + i % 2;
              if (key + column >= k_count || !seen.sees(column - 16 * t - i / 2 * 8))
                s[t][n][i] = 0.0f;
            }
          }
        }
      }
      multiply_columns<T, D>(grad_q, s, k_tile);
    }
  }
  wait_copies<0>();
  __syncthreads();

  float scales[kTiles][2];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) scales[t][0] = scales[t][1] = a.scale;
  T* to = static_cast<T*>(a.grad_q.data) + first * a.grad_q.row + head * a.grad_q.head;
  store_rows<D>(grad_q, scales, shared, warp_row, to, a.grad_q.row, q_count - row0, a.width);
}

}  // namespace

void mma_attention_backward(const Stream& stream, DType dtype, const AttentionArgs& args) {
  const auto run = [&](auto kernel, int rows, int block_rows, int heads, int threads, int bytes) {
    const int blocks = static_cast<int>(ceil_div(rows, block_rows));
    if (blocks == 0) return;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    const dim3 grid(static_cast<unsigned>(blocks * args.segments), heads);
    kernel<<<grid, threads, bytes, handle_of(stream)>>>(args, blocks);
    CUDA_CHECK(cudaGetLastError());
  };
  with_variant(dtype, args, [&]<typename T, int D, bool kLeft>(Variant<T, D, kLeft>) {
    run(key_kernel<T, D, kLeft>, args.max_k, KeyPass<D>::kRows, args.heads_k, KeyPass<D>::kThreads,
        kKeySharedBytes<D>);
    run(query_kernel<T, D, kLeft>, args.max_q, QueryPass<D>::kRows, args.heads_q,
        QueryPass<D>::kThreads, kQuerySharedBytes<D>);
  });
}

}  // namespace muster::cuda
