#include "kernels/cuda/gpu.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#ifdef MUSTER_WITH_CUDA
#include <cuda_runtime_api.h>

#include "kernels/cuda/kernel_image.h"
#endif

namespace muster {
namespace {

constexpr int kOldestMajor = 8;

std::string gib(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f GiB", static_cast<double>(bytes) / (1 << 30));
  return text;
}

std::string title(const GpuProbe& probe, int index) {
  return "GPU " + std::to_string(index) +
         (probe.gpu.name.empty() ? "" : " (" + probe.gpu.name + ")");
}

std::string capability(const GpuInfo& gpu) {
  return std::to_string(gpu.major) + "." + std::to_string(gpu.minor);
}

// " It is used by 4711 (python3, 130.0 GiB), 4712."
std::string users(const GpuProbe& probe) {
  std::string text;
  for (const GpuProcess& process : probe.others) {
    std::string about = process.name;
    if (process.memory_bytes > 0) {
      about += (about.empty() ? "" : ", ") + gib(process.memory_bytes);
    }
    text += (text.empty() ? "" : ", ") + std::to_string(process.pid) +
            (about.empty() ? "" : " (" + about + ")");
  }
  return text.empty() ? "" : " It is used by " + text + ".";
}

std::string visible_devices() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible == nullptr ? "" : std::string(" (CUDA_VISIBLE_DEVICES=") + visible + ")";
}

}  // namespace

std::string explain_gpu(const GpuProbe& probe, int index, int64_t needed_bytes) {
  const std::string gpu = title(probe, index);
  switch (probe.problem) {
    case GpuProblem::kNone:
      return "";
    case GpuProblem::kNotBuiltIn:
      return gpu +
             " cannot be used: this muster was built without CUDA; build it with "
             "-DMUSTER_CUDA=ON or set run.device = \"cpu\"";
    case GpuProblem::kNoDriver:
      return gpu + " cannot be used: " + probe.detail;
    case GpuProblem::kNoGpu:
      return gpu + " cannot be used: the NVIDIA driver shows no GPU" + visible_devices() +
             "; set run.device = \"cpu\" or see muster doctor";
    case GpuProblem::kNoSuchGpu:
      return gpu + " does not exist: there " +
             (probe.count == 1 ? "is 1 GPU, number 0"
                               : "are " + std::to_string(probe.count) + " GPUs, numbers 0 to " +
                                     std::to_string(probe.count - 1)) +
             visible_devices() + "; lower parallel.workers";
    case GpuProblem::kOldArchitecture:
      return gpu + " has compute capability " + capability(probe.gpu) + "; muster needs " +
             std::to_string(kOldestMajor) + ".0 (Ampere) or newer";
    case GpuProblem::kNoCode:
      return gpu + " has compute capability " + capability(probe.gpu) +
             ", for which this muster was not built; build it with -DCMAKE_CUDA_ARCHITECTURES=" +
             std::to_string(probe.gpu.major * 10 + probe.gpu.minor);
    case GpuProblem::kBusy:
      return gpu +
             " is held by another process (exclusive or prohibited compute mode): " + probe.detail +
             "." + users(probe) + " End that process or take another GPU";
    case GpuProblem::kBroken:
      return gpu + " does not work: " + probe.detail + "." + users(probe) +
             " Take another GPU with CUDA_VISIBLE_DEVICES, or have it reset";
    case GpuProblem::kFull:
      return gpu + " has " + gib(std::max<int64_t>(probe.gpu.free_bytes, 0)) + " of " +
             gib(probe.gpu.memory_bytes) + " free and " + gib(needed_bytes) + " are needed; " +
             gib(probe.gpu.memory_bytes - std::max<int64_t>(probe.gpu.free_bytes, 0)) +
             " are in use." + users(probe);
  }
  return "";
}

void check_gpu(int index, int64_t needed_bytes) {
  GpuProbe probe = probe_gpu(index);
  if (probe.problem == GpuProblem::kNone && probe.gpu.free_bytes < needed_bytes) {
    probe.problem = GpuProblem::kFull;
  }
  if (probe.problem == GpuProblem::kNone) return;
  throw GpuError(probe.problem, explain_gpu(probe, index, needed_bytes));
}

double gpu_peak_bf16(const std::string& name) {
  const auto has = [&name](const char* part) { return name.find(part) != std::string::npos; };
  if (has("H200") || has("H100") || has("H800")) {
    if (has("PCIe")) return 756e12;
    if (has("NVL")) return 835e12;
    return 989e12;
  }
  if (has("A100") || has("A800")) return 312e12;
  return 0.0;
}

#ifdef MUSTER_WITH_CUDA

namespace {

std::string words(cudaError_t status) {
  return std::string(cudaGetErrorString(status)) + " (" + cudaGetErrorName(status) + ")";
}

std::string version_name(int version) {  // 13000 → "13.0"
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string uuid_text(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    char byte[3];
    std::snprintf(byte, sizeof(byte), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    text += byte;
  }
  return text;
}

GpuInfo describe(int index) {
  GpuInfo gpu;
  gpu.index = index;
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) {
    cudaGetLastError();
    return gpu;
  }
  gpu.name = properties.name;
  gpu.uuid = uuid_text(properties.uuid);
  gpu.major = properties.major;
  gpu.minor = properties.minor;
  gpu.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  return gpu;
}

const NvmlGpu* find(const NvmlReport& report, const std::string& uuid) {
  for (const NvmlGpu& gpu : report.gpus) {
    if (gpu.uuid == uuid) return &gpu;
  }
  return nullptr;
}

// Why the driver does not even count the GPUs.
GpuProbe without_driver(cudaError_t status) {
  GpuProbe probe;
  if (status == cudaErrorNoDevice) {
    probe.problem = GpuProblem::kNoGpu;
    return probe;
  }
  probe.problem = GpuProblem::kNoDriver;
  int driver = 0;
  int runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (driver == 0) {
    probe.detail =
        "there is no NVIDIA driver here; install it, or start the container with GPUs "
        "(docker run --gpus all)";
  } else if (status == cudaErrorInsufficientDriver) {
    probe.detail = "the NVIDIA driver is for CUDA " + version_name(driver) +
                   " and this muster for CUDA " + version_name(runtime) + "; update the driver";
  } else {
    probe.detail = "the NVIDIA driver does not start: " + words(status);
  }
  return probe;
}

GpuProblem problem_of(cudaError_t status) {
  switch (status) {
    case cudaSuccess:
      return GpuProblem::kNone;
    case cudaErrorDevicesUnavailable:
      return GpuProblem::kBusy;
    case cudaErrorMemoryAllocation:  // not even for a context
      return GpuProblem::kFull;
    default:
      return GpuProblem::kBroken;
  }
}

void add_users(GpuProbe& probe) {
  const NvmlReport report = ask_nvml();
  const NvmlGpu* gpu = find(report, probe.gpu.uuid);
  if (gpu == nullptr) return;
  if (probe.gpu.free_bytes < 0) probe.gpu.free_bytes = gpu->free_bytes;
  for (const GpuProcess& process : gpu->processes) {
    if (process.pid != ::getpid()) probe.others.push_back(process);
  }
}

// Makes the context, which is when most of what can be wrong shows.
cudaError_t try_gpu(GpuProbe& probe) {
  cudaError_t status = cudaSetDevice(probe.gpu.index);
  size_t available = 0;
  size_t total = 0;
  if (status == cudaSuccess) status = cudaMemGetInfo(&available, &total);
  if (status != cudaSuccess) return status;
  probe.gpu.free_bytes = static_cast<int64_t>(available);
  probe.gpu.memory_bytes = static_cast<int64_t>(total);
  return cudaDeviceSynchronize();
}

}  // namespace

std::vector<GpuInfo> list_gpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return {};
  }
  const NvmlReport report = ask_nvml();
  std::vector<GpuInfo> gpus;
  for (int index = 0; index < count; ++index) {
    gpus.push_back(describe(index));
    if (const NvmlGpu* gpu = find(report, gpus.back().uuid); gpu != nullptr) {
      gpus.back().free_bytes = gpu->free_bytes;
    }
  }
  return gpus;
}

GpuProbe probe_gpu(int index) {
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess) {
    cudaGetLastError();
    return without_driver(status);
  }
  GpuProbe probe;
  probe.count = count;
  if (count == 0) {
    probe.problem = GpuProblem::kNoGpu;
    return probe;
  }
  if (index < 0 || index >= count) {
    probe.problem = GpuProblem::kNoSuchGpu;
    return probe;
  }
  probe.gpu = describe(index);
  if (probe.gpu.major > 0 && probe.gpu.major < kOldestMajor) {
    probe.problem = GpuProblem::kOldArchitecture;
    return probe;
  }
  if (const cudaError_t status = try_gpu(probe); status != cudaSuccess) {
    cudaGetLastError();
    probe.problem = problem_of(status);
    probe.detail = words(status);
  } else if (!cuda::has_kernel_image()) {
    probe.problem = GpuProblem::kNoCode;
  }
  add_users(probe);
  return probe;
}

#else

std::vector<GpuInfo> list_gpus() {
  return {};
}

GpuProbe probe_gpu(int) {
  GpuProbe probe;
  probe.problem = GpuProblem::kNotBuiltIn;
  return probe;
}

#endif

}  // namespace muster
