// Flash attention, forward. A block takes some queries of one head, a warp 16 or 32 of them (with
// 32, a fragment of keys or values read from shared memory feeds two products); blocks of keys and
// values arrive in shared memory while the block before is worked on. Scores, probabilities and the
// output stay in registers.
#include "kernels/attention/attention_mma.cuh"

namespace muster::cuda {
namespace {

template <int D>
struct Forward;
template <>
struct Forward<64> : Cut<4, 2, 128, false, 2> {};
template <>
struct Forward<128> : Cut<4, 2, 64, false, 2> {};

template <int D>
constexpr int kSharedBytes = (Forward<D>::kRows + 4 * Forward<D>::kColumns) * D * 2;

template <typename T, int D, bool kLeft>
__global__ void __launch_bounds__(Forward<D>::kThreads, Forward<D>::kBlocks)
    forward_kernel(const __grid_constant__ AttentionArgs a, int blocks_per_segment) {
  constexpr int kTiles = Forward<D>::kTiles;
  constexpr int kThreads = Forward<D>::kThreads;
  constexpr int kRows = Forward<D>::kRows;
  constexpr int kKeys = Forward<D>::kColumns;
  constexpr int kColumns = kKeys / 8;
  extern __shared__ __align__(128) unsigned char shared[];
  const int segment = blockIdx.x / blocks_per_segment;
  // The last queries see the most keys: they start first.
  const int block = blocks_per_segment - 1 - blockIdx.x % blocks_per_segment;
  const int q_begin = a.cu_q[segment];
  const int q_count = a.cu_q[segment + 1] - q_begin;
  const int k_begin = a.cu_k[segment];
  const int k_count = a.cu_k[segment + 1] - k_begin;
  const int row0 = block * kRows;
  if (row0 >= q_count) return;
  const int head = blockIdx.y;
  const int head_k = head / (a.heads_q / a.heads_k);
  const int offset = k_count - q_count;  // query i lies at key i + offset
  const int keys_end = min(k_count, row0 + kRows + offset + a.right);
  const int first_block = kLeft ? max(0, row0 + offset - a.left) / kKeys : 0;
  const int blocks = keys_end > 0 ? (keys_end + kKeys - 1) / kKeys : 0;

  const uint32_t q_tile = shared_address(shared);
  const uint32_t k_tiles = q_tile + kRows * D * 2;
  const uint32_t v_tiles = k_tiles + 2 * kKeys * D * 2;
  const T* q = static_cast<const T*>(a.q.data) + (q_begin + row0) * a.q.row + head * a.q.head;
  const T* k = static_cast<const T*>(a.k.data) + k_begin * a.k.row + head_k * a.k.head;
  const T* v = static_cast<const T*>(a.v.data) + k_begin * a.v.row + head_k * a.v.head;
  const auto load_keys = [&](int j) {
    const int key0 = j * kKeys;
    const uint32_t stage = (j & 1) * kKeys * D * 2;
    load_tile<kKeys, D, kThreads>(k_tiles + stage, k + key0 * a.k.row, a.k.row, k_count - key0,
                                  a.width);
    load_tile<kKeys, D, kThreads>(v_tiles + stage, v + key0 * a.v.row, a.v.row, k_count - key0,
                                  a.width);
  };
  load_tile<kRows, D, kThreads>(q_tile, q, a.q.row, q_count - row0, a.width);
  commit_copies();
  if (first_block < blocks) load_keys(first_block);
  commit_copies();

  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * 16 * kTiles;
  wait_copies<1>();
  __syncthreads();
  const LeftRows<D, kTiles, Forward<D>::kHeld> queries(q_tile, warp_row);
  const float scale = a.scale * kLog2e;  // exponentials are powers of two
  float acc[kTiles][D / 8][4] = {};
  float sum[kTiles][2] = {};  // of this thread's columns
  float max[kTiles][2];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) max[t][0] = max[t][1] = -INFINITY;

  for (int j = first_block; j < blocks; ++j) {
    // Behind the barrier, everybody's copies have arrived and nobody reads the other stage any
    // more.
    wait_copies<0>();
    __syncthreads();
    if (j + 1 < blocks) load_keys(j + 1);
    commit_copies();
    const int key0 = j * kKeys;
    const uint32_t stage = (j & 1) * kKeys * D * 2;
    // A warp none of whose queries sees a key of the block has nothing to add.
    if (sees_any<kLeft>(a, row0 + warp_row, 16 * kTiles, key0, kKeys, offset)) {
      float s[kTiles][kColumns][4];
      multiply_rows<T>(s, queries, k_tiles + stage);
      const bool masked = key0 + kKeys > k_count ||
                          !sees_all<kLeft>(a, row0 + warp_row, 16 * kTiles, key0, kKeys, offset);
      if (masked) {
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
                s[t][n][i] = -INFINITY;
            }
          }
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float top = max[t][half];
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
            top = fmaxf(top, fmaxf(s[t][n][2 * half], s[t][n][2 * half + 1]));
          }
          top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
          top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
          const float base = top == -INFINITY ? 0.0f : top * scale;
          const float keep = exp2_fast(max[t][half] * scale - base);
          max[t][half] = top;
          float row_sum = 0.0f;
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
              s[t][n][i] = exp2_fast(fmaf(s[t][n][i], scale, -base));
              row_sum += s[t][n][i];
            }
          }
          sum[t][half] = fmaf(sum[t][half], keep, row_sum);
          // After the first blocks, maxima seldom move.
          if (__any_sync(0xffffffffu, keep != 1.0f)) {
#pragma unroll
            for (int n = 0; n < D / 8; ++n) {
              acc[t][n][2 * half] *= keep;
              acc[t][n][2 * half + 1] *= keep;
            }
          }
        }
      }
      multiply_columns<T, D>(acc, s, v_tiles + stage);
    }
  }
  wait_copies<0>();
  __syncthreads();

  float factor[kTiles][2];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[t][half];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      factor[t][half] = total > 0.0f ? 1.0f / total : 0.0f;
      const int row = row0 + warp_row + 16 * t + 8 * half + lane / 4;
      if (lane % 4 == 0 && row < q_count) {
        a.lse[head * a.total_q + q_begin + row] =
            total > 0.0f ? max[t][half] * a.scale + logf(total) : -INFINITY;
      }
    }
  }
  T* out = static_cast<T*>(a.out.data) + (q_begin + row0) * a.out.row + head * a.out.head;
  store_rows<D>(acc, factor, shared, warp_row, out, a.out.row, q_count - row0, a.width);
}

}  // namespace

void mma_attention_forward(const Stream& stream, DType dtype, const AttentionArgs& args) {
  with_variant(dtype, args, [&]<typename T, int D, bool kLeft>(Variant<T, D, kLeft>) {
    const int blocks = static_cast<int>(ceil_div(args.max_q, Forward<D>::kRows));
    if (blocks == 0) return;
    const auto kernel = forward_kernel<T, D, kLeft>;
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<D>));
    const dim3 grid(static_cast<unsigned>(blocks * args.segments), args.heads_q);
    kernel<<<grid, Forward<D>::kThreads, kSharedBytes<D>, handle_of(stream)>>>(args, blocks);
    CUDA_CHECK(cudaGetLastError());
  });
}

}  // namespace muster::cuda
