#include <cuda_runtime_api.h>

#include "kernels/cuda/kernel_image.h"

namespace muster::cuda {
namespace {

__global__ void probe() {}

}  // namespace

bool has_kernel_image() {
  cudaFuncAttributes attributes{};
  const bool found = cudaFuncGetAttributes(&attributes, probe) == cudaSuccess;
  if (!found) cudaGetLastError();
  return found;
}

}  // namespace muster::cuda
