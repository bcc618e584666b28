#include <dlfcn.h>

#include <string>

#include "kernels/cuda/check.h"
#include "kernels/matmul/cublaslt.h"

namespace muster::cuda {
namespace {

// The loader's own search first (LD_LIBRARY_PATH, the program's lib/, ld.so.conf), then where CUDA
// installs itself, then where it lay when this was built.
void* open_library() {
  const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  std::string tried;
  for (const char* folder : {"", "/usr/local/cuda/lib64/", MUSTER_CUDA_LIBRARY_DIR "/"}) {
    if (void* library = dlopen((folder + name).c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    tried += std::string("\n  ") + dlerror();
  }
  throw CudaError("matrix products on a GPU need " + name +
                      " of the CUDA toolkit: install it or name its folder in LD_LIBRARY_PATH" +
                      tried,
                  cudaErrorInitializationError);
}

template <typename F>
void find(void* library, F& function, const char* name) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr) {
    throw CudaError(std::string("cuBLASLt has no ") + name, cudaErrorInitializationError);
  }
}

CublasLt load() {
  void* library = open_library();  // for the life of the process
  CublasLt lt{};
  find(library, lt.Create, "cublasLtCreate");
  find(library, lt.Matmul, "cublasLtMatmul");
  find(library, lt.MatmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(library, lt.MatmulDescCreate, "cublasLtMatmulDescCreate");
  find(library, lt.MatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
  find(library, lt.MatrixLayoutCreate, "cublasLtMatrixLayoutCreate");
  find(library, lt.MatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
  find(library, lt.MatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
  find(library, lt.MatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
  find(library, lt.GetStatusName, "cublasLtGetStatusName");
  find(library, lt.GetStatusString, "cublasLtGetStatusString");
  return lt;
}

}  // namespace

const CublasLt& cublaslt() {
  static const CublasLt lt = load();
  return lt;
}

void throw_cublas_error(const char* file, int line, const char* expression, cublasStatus_t status) {
  cudaGetLastError();
  throw CudaError(std::string(file) + ":" + std::to_string(line) + ": " + expression + ": " +
                      cublaslt().GetStatusString(status) + " (" + cublaslt().GetStatusName(status) +
                      ")",
                  cudaErrorUnknown);
}

}  // namespace muster::cuda
