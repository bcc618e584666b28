// Device helpers of the memory-bound kernels: packs of 16 bytes as floats, reductions in a fixed
// order, and the choice between the vector and the scalar version of a kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/tensor.h"
#include "kernels/cuda/check.h"

namespace muster::cuda {

using bf16 = __nv_bfloat16;

inline cudaStream_t handle_of(const Stream& stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(bf16 x) {
  return __bfloat162float(x);
}
__device__ inline float to_float(__half x) {
  return __half2float(x);
}
template <typename T>
__device__ T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (std::is_same_v<T, bf16>) {
    return __float2bfloat16_rn(x);
  } else {
    return __float2half_rn(x);
  }
}

// N elements of T as floats; N · sizeof(T) is 16 (one access), a multiple of 16, or N is 1.
template <typename T, int N>
struct Pack {
  float x[N];

  __device__ static Pack load(const T* p) {
    Pack pack;
    if constexpr (N == 1) {
      pack.x[0] = to_float(*p);
    } else {
      constexpr int kPerAccess = 16 / sizeof(T);
#pragma unroll
      for (int a = 0; a < N / kPerAccess; ++a) {
        const uint4 raw = *reinterpret_cast<const uint4*>(p + a * kPerAccess);
        T elements[kPerAccess];
        *reinterpret_cast<uint4*>(elements) = raw;
#pragma unroll
        for (int i = 0; i < kPerAccess; ++i) pack.x[a * kPerAccess + i] = to_float(elements[i]);
      }
    }
    return pack;
  }

  __device__ void store(T* p) const {
    if constexpr (N == 1) {
      *p = from_float<T>(x[0]);
    } else {
      constexpr int kPerAccess = 16 / sizeof(T);
#pragma unroll
      for (int a = 0; a < N / kPerAccess; ++a) {
        alignas(16) T elements[kPerAccess];
        if constexpr (std::is_same_v<T, bf16>) {
#pragma unroll
          for (int i = 0; i < kPerAccess; i += 2) {  // one instruction converts two
            reinterpret_cast<__nv_bfloat162*>(elements)[i / 2] =
                __floats2bfloat162_rn(x[a * kPerAccess + i], x[a * kPerAccess + i + 1]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < kPerAccess; ++i) {
            elements[i] = from_float<T>(x[a * kPerAccess + i]);
          }
        }
        *reinterpret_cast<uint4*>(p + a * kPerAccess) = *reinterpret_cast<uint4*>(elements);
      }
    }
  }
};

// A pack as it was loaded, in half the registers where T is bf16.
template <typename T, int N>
struct Raw {
  static_assert(N == 1 || N * sizeof(T) == 16);
  std::conditional_t<N == 1, T, uint4> data;

  __device__ static Raw load(const T* p) {
    if constexpr (N == 1) {
      return {*p};
    } else {
      return {*reinterpret_cast<const uint4*>(p)};
    }
  }
  __device__ void store(T* p) const {
    if constexpr (N == 1) {
      *p = data;
    } else {
      *reinterpret_cast<uint4*>(p) = data;
    }
  }
  // The same, written as data that is not read again soon.
  __device__ void store_streaming(T* p) const {
    if constexpr (N == 1) {
      *p = data;
    } else {
      __stcs(reinterpret_cast<uint4*>(p), data);
    }
  }
  __device__ Pack<T, N> unpack() const {
    return Pack<T, N>::load(reinterpret_cast<const T*>(&data));
  }
  // The same, here and now: without it the compiler may unpack early, or once for several uses, and
  // hold the floats.
  __device__ Pack<T, N> unpack_here() {
    static_assert(N > 1);
    asm volatile("" : "+r"(data.x), "+r"(data.y), "+r"(data.z), "+r"(data.w));
    return unpack();
  }
};

// Sums over a warp by halving: every lane gets the sum, the order is fixed.
template <typename T>
__device__ T warp_sum(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

// Sum over blockDim.x threads (a multiple of 32); every thread gets it. `scratch` holds 32 elements
// in shared memory and is free again on return.
template <typename T>
__device__ T block_sum(T x, T* scratch) {
  x = warp_sum(x);
  const int warps = blockDim.x / 32;
  if (warps == 1) return x;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int i = 0; i < warps; ++i) x += scratch[i];
  __syncthreads();
  return x;
}

// Largest value over the block (see block_sum); NaN counts as nothing.
__device__ inline float block_max(float x, float* scratch) {
  x = warp_max(x);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) x = fmaxf(x, scratch[i]);
  __syncthreads();
  return x;
}

// Raises *to to x where x is larger; both are at least 0. In whatever order blocks come, the result
// is the same. Most find nothing left to raise and leave the atomic out.
__device__ inline void raise_to(float* to, float x) {
  if (x > *static_cast<volatile float*>(to)) {
    atomicMax(reinterpret_cast<unsigned*>(to), __float_as_uint(x));
  }
}

// True if every row (all dimensions but the last) begins at a multiple of 16 bytes.
template <typename Void>
bool rows_aligned(const BasicTensorView<Void>& view) {
  const auto address = reinterpret_cast<uintptr_t>(view.raw());
  const size_t element = size_of(view.dtype());
  if (address % 16 != 0) return false;
  for (int i = 0; i + 1 < view.rank(); ++i) {
    if (view.size(i) > 1 && view.stride(i) * element % 16 != 0) return false;
  }
  return true;
}

// Where the rows (all dimensions but the last) of a view of two or three dimensions begin.
struct RowOffsets {
  uint32_t inner = 1;  // rows that follow each other at inner_stride
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;

  RowOffsets() = default;
  template <typename Void>
  explicit RowOffsets(const BasicTensorView<Void>& view)
      : inner(view.rank() == 3 && view.size(1) > 0 ? static_cast<uint32_t>(view.size(1)) : 1),
        outer_stride(view.stride(0)),
        inner_stride(view.rank() == 3 ? view.stride(1) : 0) {}
  __device__ int64_t operator[](int64_t row) const {
    if (inner == 1) return row * outer_stride;
    const auto outer = static_cast<uint32_t>(row) / inner;
    return outer * outer_stride + (static_cast<uint32_t>(row) - outer * inner) * inner_stride;
  }
};

// Calls f with a null T* for the activations' dtype: float or bf16.
template <typename F>
void with_activation(DType dtype, F f) {
  if (dtype == DType::kFloat32) {
    f(static_cast<float*>(nullptr));
  } else {
    MUSTER_CHECK(dtype == DType::kBFloat16, name_of(dtype));
    f(static_cast<bf16*>(nullptr));
  }
}

// The same for float32, bfloat16 and float16.
template <typename F>
void with_real(DType dtype, F f) {
  if (dtype == DType::kFloat16) {
    f(static_cast<__half*>(nullptr));
  } else {
    with_activation(dtype, f);
  }
}

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace muster::cuda
