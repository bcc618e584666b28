// cuBLASLt, loaded when the first product on a GPU needs it: half a gigabyte that neither a host
// without GPU nor the processes that never multiply should have to find, map or be shipped with.
#pragma once

#include <cublasLt.h>

namespace muster::cuda {

// The functions in use, under their own names without the prefix.
struct CublasLt {
  decltype(&::cublasLtCreate) Create;
  decltype(&::cublasLtMatmul) Matmul;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) MatmulAlgoGetHeuristic;
  decltype(&::cublasLtMatmulDescCreate) MatmulDescCreate;
  decltype(&::cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute;
  decltype(&::cublasLtMatrixLayoutCreate) MatrixLayoutCreate;
  decltype(&::cublasLtMatmulPreferenceCreate) MatmulPreferenceCreate;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute;
  decltype(&::cublasLtMatmulPreferenceDestroy) MatmulPreferenceDestroy;
  decltype(&::cublasLtGetStatusName) GetStatusName;
  decltype(&::cublasLtGetStatusString) GetStatusString;
};

// Throws CudaError, with what was tried, where the library or a function is missing.
const CublasLt& cublaslt();

}  // namespace muster::cuda

// As CUDA_CHECK (cuda/check.h), for its status.
#define CUBLAS_CHECK(expression)                                                           \
  do {                                                                                     \
    if (const cublasStatus_t cublas_status_ = (expression);                                \
        cublas_status_ != CUBLAS_STATUS_SUCCESS) {                                         \
      ::muster::cuda::throw_cublas_error(__FILE__, __LINE__, #expression, cublas_status_); \
    }                                                                                      \
  } while (false)

namespace muster::cuda {

[[noreturn]] void throw_cublas_error(const char* file, int line, const char* expression,
                                     cublasStatus_t status);

}  // namespace muster::cuda
