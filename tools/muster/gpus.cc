#include "tools/muster/gpus.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <memory>

namespace muster {
namespace {

// The part of NVML (nvml.h) that is used here; its functions return 0 on success.
struct NvmlMemory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};
using NvmlDevice = struct OpaqueNvmlDevice*;

class Nvml {
 public:
  explicit Nvml(void* library)
      : init_(load<int()>(library, "nvmlInit_v2")),
        shutdown_(load<int()>(library, "nvmlShutdown")),
        error_string_(load<const char*(int)>(library, "nvmlErrorString")),
        driver_version_(load<int(char*, unsigned)>(library, "nvmlSystemGetDriverVersion")),
        device_count_(load<int(unsigned*)>(library, "nvmlDeviceGetCount_v2")),
        device_(load<int(unsigned, NvmlDevice*)>(library, "nvmlDeviceGetHandleByIndex_v2")),
        device_name_(load<int(NvmlDevice, char*, unsigned)>(library, "nvmlDeviceGetName")),
        device_memory_(load<int(NvmlDevice, NvmlMemory*)>(library, "nvmlDeviceGetMemoryInfo")) {}

  GpuReport report() const {
    GpuReport report;
    if (!complete()) {
      report.problem = "libnvidia-ml.so.1 lacks functions: the driver is too old";
      return report;
    }
    if (const int error = init_(); error != 0) {
      report.problem = fmt::format("the NVIDIA driver does not start: {}", error_string_(error));
      return report;
    }
    std::array<char, 96> text{};
    if (driver_version_(text.data(), text.size()) == 0) report.driver = text.data();
    unsigned count = 0;
    if (device_count_(&count) != 0) count = 0;
    for (unsigned i = 0; i < count; ++i) add_device(i, report);
    shutdown_();
    return report;
  }

 private:
  template <typename Signature>
  static Signature* load(void* library, const char* name) {
    return reinterpret_cast<Signature*>(::dlsym(library, name));
  }
  bool complete() const {
    return init_ && shutdown_ && error_string_ && driver_version_ && device_count_ && device_ &&
           device_name_ && device_memory_;
  }
  void add_device(unsigned index, GpuReport& report) const {
    NvmlDevice device = nullptr;
    std::array<char, 96> name{};
    NvmlMemory memory{};
    if (int error = device_(index, &device); error != 0) {
      report.problem = fmt::format("GPU {}: {}", index, error_string_(error));
      return;
    }
    device_name_(device, name.data(), name.size());
    device_memory_(device, &memory);
    report.gpus.push_back({name.data(), static_cast<int64_t>(memory.total)});
  }

  int (*init_)();
  int (*shutdown_)();
  const char* (*error_string_)(int);
  int (*driver_version_)(char*, unsigned);
  int (*device_count_)(unsigned*);
  int (*device_)(unsigned, NvmlDevice*);
  int (*device_name_)(NvmlDevice, char*, unsigned);
  int (*device_memory_)(NvmlDevice, NvmlMemory*);
};

}  // namespace

GpuReport find_gpus() {
  struct Close {
    void operator()(void* library) const { ::dlclose(library); }
  };
  const std::unique_ptr<void, Close> library(::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL));
  if (library == nullptr) return {};
  GpuReport report = Nvml(library.get()).report();
  // Computing needs libcuda too; a container may have been given the one without the other.
  const std::unique_ptr<void, Close> cuda(::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL));
  if (cuda == nullptr && report.problem.empty() && !report.gpus.empty()) {
    report.problem =
        "libcuda.so.1 is missing: start the container with the compute driver capability";
  }
  return report;
}

}  // namespace muster
