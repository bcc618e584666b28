// Failures of CUDA calls as exceptions. A GPU that is missing, full or broken is the
// user's world, not our bug, so these are Errors and not CHECKs.
#pragma once

#include <cuda_runtime_api.h>

#include "common/error.h"

namespace muster::cuda {

// "file:line: expression: what the library says (its name for the error)".
class CudaError : public Error {
 public:
  CudaError(const std::string& message, cudaError_t code) : Error(message), code_(code) {}
  bool out_of_memory() const { return code_ == cudaErrorMemoryAllocation; }

 private:
  cudaError_t code_;
};

// Throws CudaError; or DeviceError, naming the GPU, where no later call of the process can succeed.
// Clears the runtime's last error first, so that the next call does not report it again.
[[noreturn]] void throw_cuda_error(const char* file, int line, const char* expression,
                                   cudaError_t status);

}  // namespace muster::cuda

// CUDA_CHECK(cudaGetLastError()) follows every kernel launch.
#define CUDA_CHECK(expression)                                                         \
  do {                                                                                 \
    if (const cudaError_t cuda_status_ = (expression); cuda_status_ != cudaSuccess) {  \
      ::muster::cuda::throw_cuda_error(__FILE__, __LINE__, #expression, cuda_status_); \
    }                                                                                  \
  } while (false)
