#ifdef MUSTER_WITH_NCCL

#include "worker/comm/nccl_library.h"

#include <dlfcn.h>

#include "common/error.h"

namespace muster {
namespace {

// The first with everything that non-blocking communicators take (ncclCommFinalize, configs).
constexpr int kOldestVersion = NCCL_VERSION(2, 14, 0);

// The loader's own search first (LD_LIBRARY_PATH, the program's lib/, ld.so.conf), then where CUDA
// installs itself, then where CUDA lay when this was built.
void* open_library() {
  std::string tried;
  for (const char* folder : {"", "/usr/local/cuda/lib64/", MUSTER_CUDA_LIBRARY_DIR "/"}) {
    const std::string path = std::string(folder) + "libnccl.so.2";
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    tried += std::string("\n  ") + dlerror();
  }
  throw Error(
      "training on several GPUs needs NCCL (libnccl.so.2): install it (the package libnccl2, "
      "or nvidia-nccl of PyPI) or name its folder in LD_LIBRARY_PATH" +
      tried);
}

template <typename F>
void find(void* library, F& function, const char* name) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr)
    throw Error(std::string("libnccl.so.2 has no ") + name + ": it is too old");
}

Nccl load() {
  void* library = open_library();  // for the life of the process
  Nccl functions{};
  find(library, functions.GetVersion, "ncclGetVersion");
  find(library, functions.GetUniqueId, "ncclGetUniqueId");
  find(library, functions.CommInitRankConfig, "ncclCommInitRankConfig");
  find(library, functions.CommFinalize, "ncclCommFinalize");
  find(library, functions.CommAbort, "ncclCommAbort");
  find(library, functions.CommGetAsyncError, "ncclCommGetAsyncError");
  find(library, functions.GetErrorString, "ncclGetErrorString");
  find(library, functions.GetLastError, "ncclGetLastError");
  find(library, functions.AllGather, "ncclAllGather");
  find(library, functions.ReduceScatter, "ncclReduceScatter");
  find(library, functions.AllReduce, "ncclAllReduce");
  find(library, functions.Send, "ncclSend");
  find(library, functions.Recv, "ncclRecv");
  find(library, functions.GroupStart, "ncclGroupStart");
  find(library, functions.GroupEnd, "ncclGroupEnd");
  if (functions.GetVersion(&functions.version) != ncclSuccess ||
      functions.version < kOldestVersion) {
    throw Error("libnccl.so.2 is NCCL " + nccl_version_name(functions.version) +
                ", too old: at least " + nccl_version_name(kOldestVersion) + " is needed");
  }
  return functions;
}

}  // namespace

const Nccl& nccl() {
  static const Nccl functions = load();
  return functions;
}

std::string nccl_version_name(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace muster

#endif  // MUSTER_WITH_NCCL
