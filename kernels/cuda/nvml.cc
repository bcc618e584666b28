#include "kernels/cuda/nvml.h"

#include <dlfcn.h>

#include <array>
#include <fstream>
#include <memory>

namespace muster {
namespace {

// The part of NVML (nvml.h) that is used here; its functions return 0 on success.
struct Memory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};
struct Process {
  unsigned pid;
  unsigned long long memory;
  unsigned gpu_instance;
  unsigned compute_instance;
};
constexpr unsigned long long kUnknownMemory = ~0ull;
using Handle = struct OpaqueNvmlDevice*;

// "" when there is no such process.
std::string name_of_process(unsigned pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/comm");
  std::string name;
  std::getline(file, name);
  return name;
}

class Nvml {
 public:
  explicit Nvml(void* library)
      : init_(load<int()>(library, "nvmlInit_v2")),
        shutdown_(load<int()>(library, "nvmlShutdown")),
        error_string_(load<const char*(int)>(library, "nvmlErrorString")),
        driver_version_(load<int(char*, unsigned)>(library, "nvmlSystemGetDriverVersion")),
        count_(load<int(unsigned*)>(library, "nvmlDeviceGetCount_v2")),
        handle_(load<int(unsigned, Handle*)>(library, "nvmlDeviceGetHandleByIndex_v2")),
        name_(load<int(Handle, char*, unsigned)>(library, "nvmlDeviceGetName")),
        uuid_(load<int(Handle, char*, unsigned)>(library, "nvmlDeviceGetUUID")),
        memory_(load<int(Handle, Memory*)>(library, "nvmlDeviceGetMemoryInfo")),
        processes_(load<int(Handle, unsigned*, Process*)>(
            library, "nvmlDeviceGetComputeRunningProcesses_v3")) {}

  NvmlReport report() const {
    NvmlReport report;
    if (!complete()) {
      report.problem = "libnvidia-ml.so.1 lacks functions: the driver is too old";
      return report;
    }
    if (const int error = init_(); error != 0) {
      report.problem = std::string("the NVIDIA driver does not start: ") + error_string_(error);
      return report;
    }
    std::array<char, 96> text{};
    if (driver_version_(text.data(), text.size()) == 0) report.driver = text.data();
    unsigned count = 0;
    if (count_(&count) != 0) count = 0;
    for (unsigned i = 0; i < count; ++i) add(i, report);
    shutdown_();
    return report;
  }

 private:
  template <typename Signature>
  static Signature* load(void* library, const char* name) {
    return reinterpret_cast<Signature*>(::dlsym(library, name));
  }
  bool complete() const {
    return init_ && shutdown_ && error_string_ && driver_version_ && count_ && handle_ && name_ &&
           uuid_ && memory_;
  }
  void add(unsigned index, NvmlReport& report) const {
    Handle handle = nullptr;
    if (const int error = handle_(index, &handle); error != 0) {
      report.problem = "GPU " + std::to_string(index) + ": " + error_string_(error);
      return;
    }
    NvmlGpu gpu;
    std::array<char, 96> text{};
    if (name_(handle, text.data(), text.size()) == 0) gpu.name = text.data();
    if (uuid_(handle, text.data(), text.size()) == 0) gpu.uuid = text.data();
    Memory memory{};
    memory_(handle, &memory);
    gpu.memory_bytes = static_cast<int64_t>(memory.total);
    gpu.free_bytes = static_cast<int64_t>(memory.free);
    gpu.processes = processes(handle);
    report.gpus.push_back(std::move(gpu));
  }
  std::vector<GpuProcess> processes(Handle handle) const {
    std::array<Process, 64> found{};
    unsigned count = found.size();
    if (processes_ == nullptr || processes_(handle, &count, found.data()) != 0) return {};
    std::vector<GpuProcess> processes;
    for (unsigned i = 0; i < count; ++i) {
      const auto memory = found[i].memory == kUnknownMemory ? 0 : found[i].memory;
      processes.push_back(
          {found[i].pid, name_of_process(found[i].pid), static_cast<int64_t>(memory)});
    }
    return processes;
  }

  int (*init_)();
  int (*shutdown_)();
  const char* (*error_string_)(int);
  int (*driver_version_)(char*, unsigned);
  int (*count_)(unsigned*);
  int (*handle_)(unsigned, Handle*);
  int (*name_)(Handle, char*, unsigned);
  int (*uuid_)(Handle, char*, unsigned);
  int (*memory_)(Handle, Memory*);
  int (*processes_)(Handle, unsigned*, Process*);
};

}  // namespace

NvmlReport ask_nvml() {
  struct Close {
    void operator()(void* library) const { ::dlclose(library); }
  };
  const std::unique_ptr<void, Close> library(::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL));
  if (library == nullptr) return {};
  NvmlReport report = Nvml(library.get()).report();
  // Computing needs libcuda too; a container may have been given the one without the other.
  const std::unique_ptr<void, Close> cuda(::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL));
  if (cuda == nullptr && report.problem.empty() && !report.gpus.empty()) {
    report.problem =
        "libcuda.so.1 is missing: start the container with the compute driver capability";
  }
  return report;
}

}  // namespace muster
