// Memory-bound: copy_cast moves (sizeof(in) + sizeof(out)) · n bytes, add 3 · sizeof · n.
#include "kernels/cuda/vec.cuh"
#include "kernels/elementwise/elementwise.h"

namespace muster::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 8;  // at least one 16-byte access for each type

template <typename Out, typename In>
__global__ void __launch_bounds__(kThreads)
    cast_kernel(Out* out, const In* x, int64_t n, bool vector) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPerThread;
  if (vector && i + kPerThread <= n) {
    const auto pack = Pack<In, kPerThread>::load(x + i);
    Pack<Out, kPerThread> result;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) result.x[k] = pack.x[k];
    result.store(out + i);
    return;
  }
  for (int64_t k = i; k < n && k < i + kPerThread; ++k) out[k] = from_float<Out>(to_float(x[k]));
}

// out may be a or b, so nothing is __restrict__.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_kernel(T* out, const T* a, const T* b, int64_t n, bool vector) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPerThread;
  if (vector && i + kPerThread <= n) {
    auto left = Pack<T, kPerThread>::load(a + i);
    const auto right = Pack<T, kPerThread>::load(b + i);
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) left.x[k] += right.x[k];
    left.store(out + i);
    return;
  }
  for (int64_t k = i; k < n && k < i + kPerThread; ++k) {
    out[k] = from_float<T>(to_float(a[k]) + to_float(b[k]));
  }
}

unsigned blocks_for(int64_t n) {
  return static_cast<unsigned>(ceil_div(n, kThreads * kPerThread));
}

bool aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

}  // namespace

void fill_zero(const Stream& stream, TensorView out) {
  CUDA_CHECK(cudaMemsetAsync(out.raw(), 0, out.bytes(), handle_of(stream)));
}

void copy_cast(const Stream& stream, TensorView out, ConstTensorView x) {
  const int64_t n = x.numel();
  if (n == 0) return;
  if (out.dtype() == x.dtype()) {
    CUDA_CHECK(cudaMemcpyAsync(out.raw(), x.raw(), x.bytes(), cudaMemcpyDeviceToDevice,
                               handle_of(stream)));
    return;
  }
  const bool vector = aligned(out.raw()) && aligned(x.raw());
  with_real(out.dtype(), [&](auto* out_type) {
    with_real(x.dtype(), [&](auto* in_type) {
      using Out = std::remove_pointer_t<decltype(out_type)>;
      using In = std::remove_pointer_t<decltype(in_type)>;
      if constexpr (!std::is_same_v<Out, In>) {
        cast_kernel<<<blocks_for(n), kThreads, 0, handle_of(stream)>>>(
            static_cast<Out*>(out.raw()), static_cast<const In*>(x.raw()), n, vector);
        CUDA_CHECK(cudaGetLastError());
      }
    });
  });
}

void add(const Stream& stream, TensorView out, ConstTensorView a, ConstTensorView b) {
  const int64_t n = out.numel();
  if (n == 0) return;
  const bool vector = aligned(out.raw()) && aligned(a.raw()) && aligned(b.raw());
  with_real(out.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    add_kernel<<<blocks_for(n), kThreads, 0, handle_of(stream)>>>(
        static_cast<T*>(out.raw()), static_cast<const T*>(a.raw()), static_cast<const T*>(b.raw()),
        n, vector);
    CUDA_CHECK(cudaGetLastError());
  });
}

}  // namespace muster::cuda
