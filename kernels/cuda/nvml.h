// The GPUs of this machine as its driver's management library reports them: without CUDA, without
// a context on any GPU, found without linking against it. In every build.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace muster {

struct GpuProcess {
  int64_t pid = 0;
  std::string name;          // "" when it is not to be seen from here (a container)
  int64_t memory_bytes = 0;  // 0 when the driver does not say
};

struct NvmlGpu {
  std::string name;
  std::string uuid;  // "GPU-…", as nvidia-smi shows it
  int64_t memory_bytes = 0;
  int64_t free_bytes = 0;
  std::vector<GpuProcess> processes;  // that compute, this one too
};

struct NvmlReport {
  std::vector<NvmlGpu> gpus;
  std::string driver;   // version; "" when there is no driver
  std::string problem;  // why the driver cannot be used; "" when there is none or it works
};

NvmlReport ask_nvml();

}  // namespace muster
