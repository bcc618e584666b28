// Memory-bound: 4 bytes read an element. Blocks of kBlock elements and the order of their sums
// depend on the size alone, so the result is the same on every GPU.
#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/device.h"
#include "kernels/cuda/vec.cuh"
#include "kernels/global_norm/global_norm.h"

namespace muster::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 32;
constexpr int64_t kBlock = kThreads * kPerThread;

__global__ void __launch_bounds__(kThreads)
    partial_kernel(double* partial, const float* x, int64_t n, bool vector) {
  __shared__ double scratch[32];
  let_next_kernel_start();
  const int64_t begin = blockIdx.x * kBlock;
  // A thread's sum is float32 over few elements; everything above it is double. The vector and the
  // scalar path add the same elements in the same order.
  float sum = 0.0f;
  if (vector && begin + kBlock <= n) {
#pragma unroll
    for (int k = 0; k < kPerThread / 4; ++k) {
      const auto pack = Pack<float, 4>::load(x + begin + (k * kThreads + threadIdx.x) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum = fmaf(pack.x[i], pack.x[i], sum);
    }
  } else {
    for (int k = 0; k < kPerThread / 4; ++k) {
      for (int i = 0; i < 4; ++i) {
        const int64_t at = begin + (k * kThreads + threadIdx.x) * 4 + i;
        if (at < n) sum = fmaf(x[at], x[at], sum);
      }
    }
  }
  const double total = block_sum(static_cast<double>(sum), scratch);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void __launch_bounds__(1024)
    final_kernel(double* sum, const double* partial, int64_t n) {
  __shared__ double scratch[32];
  wait_for_kernel_ahead();
  double mine = 0.0;
  for (int64_t i = threadIdx.x; i < n; i += 1024) mine += partial[i];
  const double total = block_sum(mine, scratch);
  if (threadIdx.x == 0) *sum += total;
}

}  // namespace

void sum_of_squares(const Stream& stream, TensorView sum, ConstTensorView x) {
  const int64_t n = x.numel();
  if (n == 0) return;
  const int64_t blocks = ceil_div(n, kBlock);
  auto* partial = static_cast<double*>(workspace(stream, Scratch::kOp, blocks * sizeof(double)));
  const bool vector = reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
  partial_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, handle_of(stream)>>>(
      partial, x.data<float>(), n, vector);
  CUDA_CHECK(cudaGetLastError());
  launch_behind(stream, final_kernel, 1, 1024, sum.data<double>(), partial, blocks);
}

}  // namespace muster::cuda
