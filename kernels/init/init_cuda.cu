// Once a run; double arithmetic bounds fill_normal.
#include "common/rng.h"
#include "kernels/cuda/vec.cuh"
#include "kernels/init/init.h"

namespace muster::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    normal_kernel(float* out, int64_t n, const CounterRng rng, int64_t first, double std) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) out[i] = static_cast<float>(std * rng.normal(static_cast<uint64_t>(first + i)));
}

__global__ void __launch_bounds__(kThreads) value_kernel(float* out, int64_t n, float value) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) out[i] = value;
}

}  // namespace

void fill_normal(const Stream& stream, TensorView out, uint64_t seed, uint64_t stream_key,
                 int64_t first, double std) {
  const int64_t n = out.numel();
  if (n == 0) return;
  normal_kernel<<<static_cast<unsigned>(ceil_div(n, kThreads)), kThreads, 0, handle_of(stream)>>>(
      out.data<float>(), n, CounterRng(seed, RandomPurpose::kInit, stream_key), first, std);
  CUDA_CHECK(cudaGetLastError());
}

void fill_value(const Stream& stream, TensorView out, float value) {
  const int64_t n = out.numel();
  if (n == 0) return;
  value_kernel<<<static_cast<unsigned>(ceil_div(n, kThreads)), kThreads, 0, handle_of(stream)>>>(
      out.data<float>(), n, value);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace muster::cuda
