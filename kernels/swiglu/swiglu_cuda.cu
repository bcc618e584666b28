// Memory-bound: forward reads 2 and writes 1, backward reads 3 and writes 2 elements for each of
// the N · F.
#include <algorithm>

#include "kernels/cuda/vec.cuh"
#include "kernels/swiglu/swiglu.h"

namespace muster::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kRowsForAmax = 4;

// Largest magnitude of a pack.
template <typename T, int W>
__device__ float amax_of(const Pack<T, W>& pack) {
  float amax = 0.0f;
#pragma unroll
  for (int k = 0; k < W; ++k) amax = fmaxf(amax, fabsf(pack.x[k]));
  return amax;
}

// Raises *to to the block's largest magnitude, as it was stored.
template <typename T>
__device__ void raise_to_block(float* to, float amax) {
  __shared__ float scratch[32];
  amax = block_max(amax, scratch);
  if (threadIdx.x == 0) raise_to(to, to_float(from_float<T>(amax)));
}

// A block takes kThreads packs of one row; rows stride over gridDim.y. amax only with kAmax.
template <typename T, int W, bool kAmax>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(T* out, const T* gate_up, int64_t rows, int64_t width, int64_t out_stride,
                   int64_t gate_up_stride, float* amax) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * W;
  float largest = 0.0f;
  for (int64_t n = i < width ? blockIdx.y : rows; n < rows; n += gridDim.y) {
    auto gate = Pack<T, W>::load(gate_up + n * gate_up_stride + i);
    const auto up = Pack<T, W>::load(gate_up + n * gate_up_stride + width + i);
#pragma unroll
    for (int k = 0; k < W; ++k) {
      gate.x[k] = __fdividef(gate.x[k], 1.0f + expf(-gate.x[k])) * up.x[k];
    }
    gate.store(out + n * out_stride + i);
    if constexpr (kAmax) largest = fmaxf(largest, amax_of(gate));
  }
  if constexpr (kAmax) raise_to_block<T>(amax, largest);
}

template <typename T, int W, bool kAmax>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(T* grad_gate_up, const T* grad_out, const T* gate_up, int64_t rows,
                    int64_t width, int64_t grad_gate_up_stride, int64_t grad_out_stride,
                    int64_t gate_up_stride, float* amax) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * W;
  float largest = 0.0f;
  for (int64_t n = i < width ? blockIdx.y : rows; n < rows; n += gridDim.y) {
    auto gate = Pack<T, W>::load(gate_up + n * gate_up_stride + i);
    auto up = Pack<T, W>::load(gate_up + n * gate_up_stride + width + i);
    const auto grad = Pack<T, W>::load(grad_out + n * grad_out_stride + i);
#pragma unroll
    for (int k = 0; k < W; ++k) {
      const float x = gate.x[k];
      // sigmoid(x) and sigmoid(−x) from one exponential, neither by subtraction.
      const float e = expf(-fabsf(x));
      const float large = __fdividef(1.0f, 1.0f + e);
      const float small = e * large;
      const float s = x >= 0.0f ? large : small;
      const float rest = x >= 0.0f ? small : large;
      gate.x[k] = grad.x[k] * up.x[k] * s * (1.0f + x * rest);
      up.x[k] = grad.x[k] * x * s;
    }
    gate.store(grad_gate_up + n * grad_gate_up_stride + i);
    up.store(grad_gate_up + n * grad_gate_up_stride + width + i);
    if constexpr (kAmax) largest = fmaxf(largest, fmaxf(amax_of(gate), amax_of(up)));
  }
  if constexpr (kAmax) raise_to_block<T>(amax, largest);
}

// Calls f with two constants: the elements of a 16-byte access where all rows are aligned, else 1;
// and whether there is an amax.
template <typename T, typename F>
void with_kernel(bool vector, bool amax, F f) {
  constexpr std::integral_constant<int, 16 / sizeof(T)> kWide;
  constexpr std::integral_constant<int, 1> kNarrow;
  if (vector) {
    amax ? f(kWide, std::true_type()) : f(kWide, std::false_type());
  } else {
    amax ? f(kNarrow, std::true_type()) : f(kNarrow, std::false_type());
  }
}

// With an amax some rows a block, because each block ends with a reduction.
dim3 grid_for(int64_t rows, int64_t packs, bool amax) {
  const int64_t blocks = amax ? ceil_div(rows, kRowsForAmax) : rows;
  return dim3(static_cast<unsigned>(ceil_div(packs, kThreads)),
              static_cast<unsigned>(std::min<int64_t>(blocks, 65535)));
}

float* address_of(const TensorView& amax) {
  return amax.defined() ? amax.data<float>() : nullptr;
}

}  // namespace

void swiglu_forward(const Stream& stream, TensorView out, ConstTensorView gate_up,
                    TensorView amax) {
  const int64_t rows = out.size(0);
  const int64_t width = out.size(1);
  if (rows == 0 || width == 0) return;
  with_activation(out.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const bool vector = width * sizeof(T) % 16 == 0 && rows_aligned(out) && rows_aligned(gate_up);
    with_kernel<T>(vector, amax.defined(), [&](auto w, auto with_amax) {
      forward_kernel<T, w.value, with_amax.value>
          <<<grid_for(rows, ceil_div(width, w.value), with_amax), kThreads, 0, handle_of(stream)>>>(
              static_cast<T*>(out.raw()), static_cast<const T*>(gate_up.raw()), rows, width,
              out.stride(0), gate_up.stride(0), address_of(amax));
    });
  });
  CUDA_CHECK(cudaGetLastError());
}

void swiglu_backward(const Stream& stream, TensorView grad_gate_up, ConstTensorView grad_out,
                     ConstTensorView gate_up, TensorView amax) {
  const int64_t rows = grad_out.size(0);
  const int64_t width = grad_out.size(1);
  if (rows == 0 || width == 0) return;
  with_activation(grad_out.dtype(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const bool vector = width * sizeof(T) % 16 == 0 && rows_aligned(grad_gate_up) &&
                        rows_aligned(grad_out) && rows_aligned(gate_up);
    with_kernel<T>(vector, amax.defined(), [&](auto w, auto with_amax) {
      backward_kernel<T, w.value, with_amax.value>
          <<<grid_for(rows, ceil_div(width, w.value), with_amax), kThreads, 0, handle_of(stream)>>>(
              static_cast<T*>(grad_gate_up.raw()), static_cast<const T*>(grad_out.raw()),
              static_cast<const T*>(gate_up.raw()), rows, width, grad_gate_up.stride(0),
              grad_out.stride(0), gate_up.stride(0), address_of(amax));
    });
  });
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace muster::cuda
