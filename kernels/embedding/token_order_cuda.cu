// A stable radix sort. Up to kMaxTokens on Hopper: one kernel of one cluster of blocks, nine bits a
// pass, which needs neither launches between its passes nor atomics. A warp ranks 32 tokens at a
// time by votes, warps and blocks are put in order by prefix sums of their digit counts, and blocks
// read each other's counts from shared memory. The rest goes to CUB.
#include <cooperative_groups.h>

#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/vec.cuh"
#include "kernels/embedding/token_order_cuda.h"

namespace muster::cuda {
namespace {

constexpr int kBlocks = 16;  // of the cluster; more than the 8 that every GPU guarantees
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kDigitBits = 9;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kMaxSteps = 8;  // tokens of a lane
constexpr int64_t kMaxTokens = int64_t{kBlocks} * kThreads * kMaxSteps;
constexpr int kCounterBytes = kWarps * kDigits * sizeof(uint32_t);

int id_bits(int64_t vocab) {
  return std::max(1, static_cast<int>(std::bit_width(static_cast<uint64_t>(vocab - 1))));
}

template <int kSteps>
__global__ void __launch_bounds__(kThreads, 1)
    cluster_sort_kernel(const int32_t* ids, TokenOfId* out, TokenOfId* spare, int count,
                        int passes) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ uint32_t counters[];  // [warp][digit]
  __shared__ uint32_t totals[kDigits];    // of this block
  __shared__ uint32_t bases[kDigits];     // where the block's first token of a digit goes
  __shared__ uint32_t warp_totals[kDigits / 32];
  const auto cluster = cooperative_groups::this_cluster();
  const int block = static_cast<int>(cluster.block_rank());
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int begin = (block * kWarps + warp) * kSteps * 32 + lane;
  uint32_t* mine = counters + warp * kDigits;
  const uint32_t lower_lanes = (1u << lane) - 1;
  for (int pass = 0; pass < passes; ++pass) {
    // The last pass writes to `out`.
    const TokenOfId* from = (passes - pass) % 2 == 0 ? out : spare;
    TokenOfId* to = (passes - pass) % 2 == 0 ? spare : out;
    const int shift = pass * kDigitBits;
    TokenOfId items[kSteps];
    uint32_t ranks[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int at = begin + i * 32;
      items[i] = {static_cast<uint32_t>(at), 0};
      if (at >= count) continue;
      if (pass == 0) {
        items[i].id = static_cast<uint32_t>(ids[at]);
      } else {  // from other blocks: past the L1 cache
        const uint2 raw = __ldcg(reinterpret_cast<const uint2*>(from) + at);
        items[i] = {raw.x, raw.y};
      }
    }
    for (int i = lane; i < kDigits / 4; i += 32) {
      reinterpret_cast<uint4*>(mine)[i] = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const bool valid = begin + i * 32 < count;
      const uint32_t digit = items[i].id >> shift & (kDigits - 1);
      uint32_t peers = __ballot_sync(0xffffffffu, valid);  // lanes of the same digit
#pragma unroll
      for (int bit = 0; bit < kDigitBits; ++bit) {
        const bool set = (digit >> bit & 1) != 0;
        const uint32_t votes = __ballot_sync(0xffffffffu, set);
        peers &= set ? votes : ~votes;
      }
      const uint32_t before = valid ? mine[digit] : 0;
      __syncwarp();
      ranks[i] = before + __popc(peers & lower_lanes);
      if (valid && (peers & lower_lanes) == 0) mine[digit] = before + __popc(peers);
      __syncwarp();
    }
    __syncthreads();
    const int digit = threadIdx.x;
    if (digit < kDigits) {
      uint32_t sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const uint32_t count_of_warp = counters[w * kDigits + digit];
        counters[w * kDigits + digit] = sum;
        sum += count_of_warp;
      }
      totals[digit] = sum;
    }
    cluster.sync();
    uint32_t all = 0;
    uint32_t earlier_blocks = 0;
    uint32_t scan = 0;
    if (digit < kDigits) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const uint32_t total = *cluster.map_shared_rank(&totals[digit], b);
        if (b < block) earlier_blocks += total;
        all += total;
      }
      scan = all;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, scan, offset);
        if (lane >= offset) scan += other;
      }
      if (lane == 31) warp_totals[warp] = scan;
    }
    __syncthreads();
    if (digit < kDigits) {
      uint32_t base = scan - all + earlier_blocks;
      for (int w = 0; w < warp; ++w) base += warp_totals[w];
      bases[digit] = base;
    }
    __syncthreads();
    // Not earlier: blocks of the next kernel would fill the other multiprocessors alone.
    if (pass + 1 == passes) let_next_kernel_start();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (begin + i * 32 >= count) continue;
      const uint32_t d = items[i].id >> shift & (kDigits - 1);
      to[bases[d] + mine[d] + ranks[i]] = items[i];
    }
    // Also keeps `totals` until every block has read it.
    cluster.sync();
  }
#endif
}

template <int kSteps>
cudaLaunchConfig_t cluster_config(const Stream& stream, cudaLaunchAttribute& attribute) {
  auto* const kernel = cluster_sort_kernel<kSteps>;
  CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kCounterBytes));
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = kBlocks;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kBlocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kCounterBytes;
  config.stream = handle_of(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return config;
}

// Whether the GPU holds a cluster of this size.
bool cluster_fits(const Stream& stream) {
  if (!hopper_or_newer()) return false;
  thread_local int known_device = -1;
  thread_local int clusters = 0;
  if (stream.device.index != known_device) {
    cudaLaunchAttribute attribute{};
    const cudaLaunchConfig_t config = cluster_config<kMaxSteps>(stream, attribute);
    CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, cluster_sort_kernel<kMaxSteps>, &config));
    known_device = stream.device.index;
  }
  return clusters > 0;
}

__global__ void __launch_bounds__(256)
    list_kernel(TokenOfId* out, const int32_t* ids, int64_t tokens) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i < tokens) out[i] = {static_cast<uint32_t>(i), static_cast<uint32_t>(ids[i])};
}

size_t spare_bytes(int64_t tokens) {
  return static_cast<size_t>(ceil_div(tokens * static_cast<int64_t>(sizeof(TokenOfId)), 256) * 256);
}

size_t cub_bytes(int64_t tokens, int64_t vocab) {
  size_t bytes = 0;
  uint64_t* const none = nullptr;
  CUDA_CHECK(
      cub::DeviceRadixSort::SortKeys(nullptr, bytes, none, none, tokens, 32, 32 + id_bits(vocab)));
  return static_cast<size_t>(ceil_div(static_cast<int64_t>(bytes), 256) * 256);
}

}  // namespace

size_t token_sort_bytes(int64_t tokens, int64_t vocab) {
  // CUB's share even where the cluster does the sort: the choice is made later.
  return spare_bytes(tokens) + cub_bytes(tokens, vocab);
}

void sort_tokens(const Stream& stream, TokenOfId* out, const int32_t* ids, int64_t tokens,
                 int64_t vocab, void* scratch) {
  auto* spare = static_cast<TokenOfId*>(scratch);
  if (tokens <= kMaxTokens && cluster_fits(stream)) {
    const auto launch = [&]<int kSteps>(std::integral_constant<int, kSteps>) {
      cudaLaunchAttribute attribute{};
      const cudaLaunchConfig_t config = cluster_config<kSteps>(stream, attribute);
      CUDA_CHECK(cudaLaunchKernelEx(&config, cluster_sort_kernel<kSteps>, ids, out, spare,
                                    static_cast<int>(tokens),
                                    static_cast<int>(ceil_div(id_bits(vocab), kDigitBits))));
    };
    const int64_t steps = ceil_div(tokens, int64_t{kBlocks} * kThreads);
    if (steps == 1) return launch(std::integral_constant<int, 1>());
    if (steps == 2) return launch(std::integral_constant<int, 2>());
    if (steps <= 4) return launch(std::integral_constant<int, 4>());
    return launch(std::integral_constant<int, kMaxSteps>());
  }
  list_kernel<<<static_cast<unsigned>(ceil_div(tokens, 256)), 256, 0, handle_of(stream)>>>(
      spare, ids, tokens);
  CUDA_CHECK(cudaGetLastError());
  size_t bytes = cub_bytes(tokens, vocab);
  CUDA_CHECK(cub::DeviceRadixSort::SortKeys(static_cast<char*>(scratch) + spare_bytes(tokens),
                                            bytes, reinterpret_cast<const uint64_t*>(spare),
                                            reinterpret_cast<uint64_t*>(out), tokens, 32,
                                            32 + id_bits(vocab), handle_of(stream)));
}

}  // namespace muster::cuda
