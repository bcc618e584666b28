#include "worker/device/compute_device.h"

#include <fmt/format.h>

#include <algorithm>

#include "common/error.h"
#include "kernels/cuda/gpu.h"
#include "kernels/fp8/fp8.h"
#include "kernels/matmul/matmul.h"

namespace muster {

Device choose_device(const RunConfig& run, int local_rank) {
  if (run.device == "cpu") return Device::cpu();
  const int gpus = gpu_count();
  if (gpus == 0 && run.device == "auto") return Device::cpu();
  if (gpus > 0 && local_rank >= gpus) {
    throw ConfigError(
        fmt::format("worker {} of this node has no GPU of its own, the node has {}: start one "
                    "worker per GPU, or set run.device = \"cpu\"",
                    local_rank, gpus));
  }
  check_gpu(local_rank);
  return Device::cuda(local_rank);
}

DType choose_compute_dtype(const Config& config, Device device) {
  if (device.is_cuda()) {
    return config.precision.compute == "float32" ? DType::kFloat32 : DType::kBFloat16;
  }
  const auto refuse = [](const std::string& key) {
    throw ConfigError(key + " needs a GPU, and this worker has none: see `muster doctor`");
  };
  if (config.precision.compute == "bfloat16") refuse("precision.compute = \"bfloat16\"");
  if (config.precision.matmul == "fp8") refuse("precision.matmul = \"fp8\"");
  if (config.precision.moments == "bfloat16") refuse("precision.moments = \"bfloat16\"");
  if (config.parallel.reduce_dtype == "bfloat16") refuse("parallel.reduce_dtype = \"bfloat16\"");
  return DType::kFloat32;
}

namespace {

// Also makes the device current, which must come before everything else on it.
Device current(Device device) {
  use_device(device);
  return device;
}

}  // namespace

ComputeDevice::ComputeDevice(Device device, DType dtype) : stream_(current(device)) {
  rest_.memory = device_allocator(device);
  context_ = {.stream = stream_.stream(), .allocator = rest_.memory.get(), .dtype = dtype};
  if (!device.is_cuda()) return;
  for (const GpuInfo& gpu : list_gpus()) {
    if (gpu.index == device.index) peak_flops_ = gpu_peak_bf16(gpu.name);
  }
}

void ComputeDevice::configure(const Config& config) {
  const Device device = context_.stream.device;
  context_.fp8 = config.precision.matmul == "fp8";
  if (context_.fp8 && !fp8_supported(device)) {
    throw ConfigError(
        fmt::format("precision.matmul = \"fp8\": GPU {} has no float8 products (Hopper and newer "
                    "do), use \"auto\"",
                    device.index));
  }
  context_.deterministic = config.run.deterministic;
  set_matmul_measured(!config.run.deterministic);
}

void ComputeDevice::Reserve::take(size_t size) {
  const Device device = memory->device();
  arena = std::make_shared<Arena>(device, memory->allocate(size), size, memory);
  bytes = size;
}

void ComputeDevice::reserve(size_t kept, size_t rest) {
  const Device device = context_.stream.device;
  MUSTER_CHECK(device.is_cuda());
  give_back();
  kept_.memory = device_allocator(device);
  kept_.take(kept);
  rest_.take(rest);
  context_.state_allocator = kept_.arena.get();
  context_.allocator = rest_.arena.get();
}

void ComputeDevice::give_back() {
  if (!rest_.arena) return;
  MUSTER_CHECK(rest_.empty(), "tensors outlive the memory that they lie in");
  peak_ = peak_bytes();
  lingering_ = kept_.empty() ? 0 : kept_.bytes;
  // An allocator keeps what it is given back, for requests of the same size; these go with it.
  kept_ = {};
  rest_ = {.memory = device_allocator(context_.stream.device), .arena = nullptr, .bytes = 0};
  context_.state_allocator = nullptr;
  context_.allocator = rest_.memory.get();
}

bool ComputeDevice::is_reserved(size_t kept, size_t rest) const {
  return rest_.arena && kept_.empty() && rest_.empty() && kept <= kept_.bytes &&
         rest <= rest_.bytes;
}

size_t ComputeDevice::free_bytes() const {
  return free_memory(context_.stream.device);
}

size_t ComputeDevice::peak_bytes() const {
  const DeviceMemory memory = memory_of(*rest_.memory);
  const size_t kept = kept_.memory ? memory_of(*kept_.memory).peak : 0;
  return std::max(peak_, lingering_ + kept + memory.peak + memory.scratch);
}

size_t ComputeDevice::scratch_bytes() const {
  return memory_of(*rest_.memory).scratch;
}

}  // namespace muster
