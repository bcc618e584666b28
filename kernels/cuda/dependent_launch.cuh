// Kernels that start while the one ahead of them in the stream still runs (programmatic dependent
// launch, sm_90), which hides the launch of a short second kernel. On older GPUs it is an ordinary
// launch.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/check.h"
#include "kernels/cuda/device.h"

namespace muster::cuda {

// In the first kernel: the next one's blocks may start as soon as there is room.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In the second, by every thread, before it touches anything the kernel ahead reads or writes:
// waits until that kernel has ended and its writes are visible.
__device__ inline void wait_for_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether the current device is a Hopper GPU (sm_90) or newer.
inline bool hopper_or_newer() {
  thread_local int known_device = -1;
  thread_local int major = 0;
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  if (device != known_device) {
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    known_device = device;
  }
  return major >= 9;
}

// Launches a kernel that calls wait_for_kernel_ahead().
template <typename... Parameters, typename... Arguments>
void launch_behind(const Stream& stream, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                   Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &attribute;
  config.numAttrs = hopper_or_newer() ? 1 : 0;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

}  // namespace muster::cuda
