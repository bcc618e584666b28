// Which GPUs there are, and why one cannot be used. In every build: without CUDA there are none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/error.h"
#include "kernels/cuda/nvml.h"

namespace muster {

struct GpuInfo {
  int index = 0;  // CUDA's ordinal: counts those that CUDA_VISIBLE_DEVICES leaves
  std::string name;
  std::string uuid;  // "GPU-…", as nvidia-smi shows it
  int major = 0;     // compute capability
  int minor = 0;
  int64_t memory_bytes = 0;
  int64_t free_bytes = -1;  // -1: not known
};

enum class GpuProblem {
  kNone,
  kNotBuiltIn,       // this program was built without CUDA
  kNoDriver,         // or one that is too old
  kNoGpu,            // the driver shows none
  kNoSuchGpu,        // fewer than asked for
  kOldArchitecture,  // older than compute capability 8.0
  kNoCode,           // none that this program was built for
  kBusy,             // held by another process
  kBroken,           // whatever else the driver says against it
  kFull,             // too little free memory
};

// A GPU that cannot be used; the message says which, why, and what to do.
class GpuError : public Error {
 public:
  GpuError(GpuProblem problem, const std::string& message) : Error(message), problem_(problem) {}
  GpuProblem problem() const { return problem_; }

 private:
  GpuProblem problem_;
};

// What trying to use a GPU gave.
struct GpuProbe {
  GpuProblem problem = GpuProblem::kNone;
  std::string detail;              // the driver's own words
  int count = 0;                   // GPUs there are
  GpuInfo gpu;                     // as far as it got
  std::vector<GpuProcess> others;  // processes that use it; may be unknown
};

// In the order of their index. Empty without CUDA, driver or GPU. Makes no context on any of them.
std::vector<GpuInfo> list_gpus();
// Makes a context on the GPU, and it the calling thread's current one.
GpuProbe probe_gpu(int index);
// What a probe's problem means to whoever asked for GPU `index` and `needed_bytes` of memory; ""
// when there is none.
std::string explain_gpu(const GpuProbe& probe, int index, int64_t needed_bytes);

// What a worker calls before it uses a GPU: as probe_gpu, but throws GpuError. So little memory
// that nothing could be trained is refused in any case; a plan's need is `needed_bytes`.
constexpr int64_t kLeastGpuMemory = int64_t{1} << 30;
void check_gpu(int index, int64_t needed_bytes = kLeastGpuMemory);

// Dense bf16 FLOP/s with float32 accumulation that the maker states for a GPU of this name (as
// CUDA gives it); 0 when it is not known here.
double gpu_peak_bf16(const std::string& name);

}  // namespace muster
