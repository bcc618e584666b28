// Losses from logits, and in place their gradients. The logits are read once where the registers of
// a cluster of blocks hold a row, else twice.
#include "kernels/cross_entropy/softmax_cuda.h"
#include "kernels/cuda/vec.cuh"

namespace muster::cuda {
namespace {

constexpr int kThreads = 512;
// Of held_kernel: packs a thread, and threads a block. Smaller blocks, several on a multiprocessor,
// were slower, because larger clusters wait for each other more.
constexpr int kHeld = 8;
constexpr int kHeldThreads = 1024;
constexpr int kMaxCluster = 8;  // what every GPU with clusters allows

// Maximum and Σ exp(x − maximum) of a set of numbers.
struct LogSum {
  float max = -INFINITY;
  float sum = 0.0f;
};

__device__ LogSum merge(const LogSum& a, const LogSum& b) {
  const float max = fmaxf(a.max, b.max);
  if (max == -INFINITY) return {max, a.sum + b.sum};  // 0, or a NaN to keep
  return {max, a.sum * __expf(a.max - max) + b.sum * __expf(b.max - max)};
}

// Over the first `lanes` (a power of two) lanes of a warp, which all get the result.
__device__ LogSum warp_merge(LogSum mine, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    const LogSum other{__shfl_xor_sync(0xffffffffu, mine.max, offset),
                       __shfl_xor_sync(0xffffffffu, mine.sum, offset)};
    mine = threadIdx.x & offset ? merge(other, mine) : merge(mine, other);
  }
  return mine;
}

__device__ float loss_of(const LogSum& all, float target_logit) {
  return (all.max - target_logit) + logf(all.sum);
}

// What each kernel here does: see softmax_loss; kGradient is its `gradient`.

// One block a token, any vocabulary: the logits are read twice.
template <typename T, int W, bool kGradient>
__global__ void __launch_bounds__(kThreads)
    softmax_kernel(float* losses, T* logits, const int32_t* targets, int64_t vocab,
                   int32_t ignore_index) {
  __shared__ LogSum scratch[kThreads / 32];
  T* row = logits + blockIdx.x * vocab;
  const int32_t target = targets[blockIdx.x];
  const int64_t packs = vocab / W;
  if (target == ignore_index) {
    if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
    if constexpr (kGradient) {
      const Pack<T, W> zero{};
      for (int64_t p = threadIdx.x; p < packs; p += kThreads) zero.store(row + p * W);
    }
    return;
  }
  LogSum mine;
#pragma unroll 2
  for (int64_t p = threadIdx.x; p < packs; p += kThreads) {
    const auto pack = Pack<T, W>::load(row + p * W);
    float max = pack.x[0];
#pragma unroll
    for (int i = 1; i < W; ++i) max = fmaxf(max, pack.x[i]);
    if (max > mine.max) {
      mine.sum *= __expf(mine.max - max);
      mine.max = max;
    }
    const float base = mine.max == -INFINITY ? 0.0f : mine.max;
#pragma unroll
    for (int i = 0; i < W; ++i) mine.sum += __expf(pack.x[i] - base);
  }
  mine = warp_merge(mine, 32);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = mine;
  __syncthreads();
  LogSum all;
  for (int i = 0; i < kThreads / 32; ++i) all = merge(all, scratch[i]);
  if (threadIdx.x == 0) losses[blockIdx.x] = loss_of(all, to_float(row[target]));
  if constexpr (kGradient) {
    __syncthreads();  // the target's logit has been read
    const float scale = 1.0f / all.sum;
#pragma unroll 2
    for (int64_t p = threadIdx.x; p < packs; p += kThreads) {
      auto pack = Pack<T, W>::load(row + p * W);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        pack.x[i] = scale * __expf(pack.x[i] - all.max) - (p * W + i == target ? 1.0f : 0.0f);
      }
      pack.store(row + p * W);
    }
  }
}

// Barriers and shared memory of the blocks of a cluster (Hopper and later). Elsewhere the kernel
// that uses them is never launched.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ inline LogSum load_from(const LogSum* mine, int rank) {
  LogSum other;
#if __CUDA_ARCH__ >= 900
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(mine));
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %2, %3;\n"
      "ld.shared::cluster.v2.f32 {%0, %1}, [remote];\n"
      "}\n"
      : "=f"(other.max), "=f"(other.sum)
      : "r"(address), "r"(rank)
      : "memory");
#endif
  return other;
}

// e^(x − base) by the quickest way that T's precision allows. __expf would also care for results
// below the normal numbers, at twice the instructions.
template <typename T>
__device__ float exp_from(float x, float base) {
  constexpr float kLog2E = 1.4426950408889634f;
  float y;
  const float exponent = sizeof(T) == 4 ? (x - base) * kLog2E : fmaf(x, kLog2E, -base * kLog2E);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(exponent));
  return y;
}

template <typename T, int N>
__device__ float max_of(Raw<T, 16 / sizeof(T)> (&held)[N]) {
  if constexpr (std::is_same_v<T, bf16>) {  // two at a time
    const auto pairs = [&](int h) {
      return reinterpret_cast<const __nv_bfloat162*>(&held[h].data);
    };
    __nv_bfloat162 max = pairs(0)[0];
#pragma unroll
    for (int h = 0; h < N; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) max = __hmax2(max, pairs(h)[i]);
    }
    return fmaxf(__low2float(max), __high2float(max));
  } else {
    float max = -INFINITY;
#pragma unroll
    for (int h = 0; h < N; ++h) {
      const auto pack = held[h].unpack_here();
#pragma unroll
      for (int i = 0; i < 4; ++i) max = fmaxf(max, pack.x[i]);
    }
    return max;
  }
}

// The same with a cluster of blocks a token, whose registers hold the row: kHeld packs a thread.
template <typename T, bool kGradient>
__global__ void __launch_bounds__(kHeldThreads)
    held_kernel(float* losses, T* logits, const int32_t* targets, int64_t vocab,
                int32_t ignore_index, int cluster) {
  constexpr int W = 16 / sizeof(T);
  constexpr int kWarps = kHeldThreads / 32;
  __shared__ LogSum warps[kWarps];
  __shared__ alignas(8) LogSum part;
  const int64_t n = blockIdx.x / cluster;
  const int rank = static_cast<int>(blockIdx.x % cluster);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  T* row = logits + n * vocab;
  const int packs = static_cast<int>(vocab / W);
  const int share = (packs + cluster - 1) / cluster;
  const int first = rank * share + static_cast<int>(threadIdx.x);
  const int end = min(packs, (rank + 1) * share);
  // What lies behind the end counts as e^−∞.
  constexpr uint32_t kNothing = sizeof(T) == 4 ? 0xff800000u : 0xff80ff80u;
  Raw<T, W> held[kHeld];
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    const int p = first + h * kHeldThreads;
    held[h] = {make_uint4(kNothing, kNothing, kNothing, kNothing)};
    if (p < end) held[h] = Raw<T, W>::load(row + static_cast<int64_t>(p) * W);
  }
  const int32_t target = targets[n];
  if (target == ignore_index) {
    if (rank == 0 && threadIdx.x == 0) losses[n] = 0.0f;
    if constexpr (kGradient) {
      const Pack<T, W> zero{};
      for (int p = first; p < end; p += kHeldThreads) {
        zero.store(row + static_cast<int64_t>(p) * W);
      }
    }
    return;
  }
  const float target_logit = to_float(row[target]);
  LogSum all{warp_max(max_of<T>(held)), 0.0f};
  const float base = all.max == -INFINITY ? 0.0f : all.max;  // a warp behind the end
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    const auto pack = held[h].unpack_here();
#pragma unroll
    for (int i = 0; i < W; ++i) all.sum += exp_from<T>(pack.x[i], base);
  }
  all.sum = warp_sum(all.sum);
  if (lane == 0) warps[threadIdx.x / 32] = all;
  __syncthreads();  // also: the target's logit has been read
  all = warp_merge(warps[lane % kWarps], kWarps);
  if (cluster > 1) {
    if (threadIdx.x == 0) part = all;
    cluster_arrive();
    cluster_wait();
    all = warp_merge(load_from(&part, lane % cluster), cluster);
    cluster_arrive();  // nobody leaves before all have read its part
  }
  if (rank == 0 && threadIdx.x == 0) losses[n] = loss_of(all, target_logit);
  if constexpr (kGradient) {
    const float scale = 1.0f / all.sum;
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int p = first + h * kHeldThreads;
      if (p >= end) break;
      auto pack = held[h].unpack_here();
#pragma unroll
      for (int i = 0; i < W; ++i) pack.x[i] = scale * exp_from<T>(pack.x[i], all.max);
      if (target / W == p) {
#pragma unroll
        for (int i = 0; i < W; ++i) pack.x[i] -= target % W == i ? 1.0f : 0.0f;
      }
      pack.store(row + static_cast<int64_t>(p) * W);
    }
  }
  if (cluster > 1) cluster_wait();
}

// Blocks of the cluster that holds a row; 0 where that cannot be or would leave threads idle.
int cluster_for(int64_t vocab, int width) {
  if (vocab % width != 0 || vocab / width < kHeldThreads) return 0;
  int cluster = 1;
  while (vocab / width > int64_t{cluster} * kHeldThreads * kHeld) cluster *= 2;
  if (cluster > kMaxCluster) return 0;
  int device = 0;
  int clusters = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device));
  return cluster == 1 || clusters != 0 ? cluster : 0;
}

// One call's rows of logits.
template <typename T>
struct Rows {
  float* losses;
  T* logits;
  const int32_t* targets;
  int64_t count;
  int64_t vocab;
  int32_t ignore_index;
};

// False where that kernel does not suit the vocabulary.
template <typename T>
bool launch_held(const Stream& stream, const Rows<T>& rows, bool gradient) {
  const int cluster = cluster_for(rows.vocab, 16 / sizeof(T));
  if (cluster == 0) return false;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(rows.count * cluster));
  config.blockDim = dim3(kHeldThreads);
  config.stream = handle_of(stream);
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  const auto kernel = gradient ? held_kernel<T, true> : held_kernel<T, false>;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, rows.losses, rows.logits, rows.targets, rows.vocab,
                                rows.ignore_index, cluster));
  return true;
}

template <typename T>
void launch_softmax(const Stream& stream, const Rows<T>& rows, bool gradient) {
  if (launch_held(stream, rows, gradient)) return;
  constexpr int kWidth = 16 / sizeof(T);
  const auto launch = [&](auto kernel) {
    kernel<<<static_cast<unsigned>(rows.count), kThreads, 0, handle_of(stream)>>>(
        rows.losses, rows.logits, rows.targets, rows.vocab, rows.ignore_index);
    CUDA_CHECK(cudaGetLastError());
  };
  if (rows.vocab % kWidth == 0) {
    gradient ? launch(softmax_kernel<T, kWidth, true>) : launch(softmax_kernel<T, kWidth, false>);
  } else {
    gradient ? launch(softmax_kernel<T, 1, true>) : launch(softmax_kernel<T, 1, false>);
  }
}

}  // namespace

void softmax_loss(const Stream& stream, float* losses, TensorView logits, ConstTensorView targets,
                  int32_t ignore_index, bool gradient) {
  with_activation(logits.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    launch_softmax<T>(stream,
                      {.losses = losses,
                       .logits = static_cast<T*>(logits.raw()),
                       .targets = targets.data<int32_t>(),
                       .count = logits.size(0),
                       .vocab = logits.size(1),
                       .ignore_index = ignore_index},
                      gradient);
  });
}

}  // namespace muster::cuda
