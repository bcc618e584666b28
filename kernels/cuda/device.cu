#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "kernels/cuda/check.h"
#include "kernels/cuda/device.h"

namespace muster::cuda {

namespace {

// After these the context is lost: every later call returns the same.
bool is_sticky(cudaError_t status) {
  switch (status) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorLaunchFailure:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorExternalDevice:
      return true;
    default:
      return false;
  }
}

// "GPU 1 (bus 0000:3b:00.0)"; answered by the driver alone, so also after an error that stays.
std::string name_of_gpu() {
  int device = 0;
  char bus[32] = {};
  if (cudaGetDevice(&device) != cudaSuccess) return "a GPU";
  if (cudaDeviceGetPCIBusId(bus, sizeof bus, device) != cudaSuccess) bus[0] = '\0';
  return "GPU " + std::to_string(device) +
         (bus[0] != '\0' ? " (bus " + std::string(bus) + ")" : "");
}

}  // namespace

void throw_cuda_error(const char* file, int line, const char* expression, cudaError_t status) {
  cudaGetLastError();
  const std::string message = std::string(file) + ":" + std::to_string(line) + ": " + expression +
                              ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) +
                              ")";
  if (is_sticky(status)) throw DeviceError(name_of_gpu() + " failed: " + message);
  throw CudaError(message, status);
}

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

int multiprocessors() {
  thread_local int known_device = -1;
  thread_local int count = 0;
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  if (device != known_device) {
    CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    known_device = device;
  }
  return count;
}

struct DeviceAllocator::Pool {
  std::mutex mutex;
  std::multimap<size_t, void*> free;
  size_t in_use = 0;
  size_t peak = 0;

  void release_free() {
    for (const auto& [bytes, pointer] : free) cudaFree(pointer);
    free.clear();
  }
  ~Pool() { release_free(); }
};

DeviceAllocator::DeviceAllocator(int device)
    : device_(Device::cuda(device)), pool_(std::make_shared<Pool>()) {}
DeviceAllocator::~DeviceAllocator() = default;

std::shared_ptr<void> DeviceAllocator::allocate(size_t bytes) {
  const size_t size = std::max<size_t>((bytes + 511) / 512 * 512, 512);
  std::lock_guard lock(pool_->mutex);
  void* pointer = nullptr;
  if (const auto it = pool_->free.find(size); it != pool_->free.end()) {
    pointer = it->second;
    pool_->free.erase(it);
  } else {
    cudaError_t status = cudaMalloc(&pointer, size);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      pool_->release_free();  // blocks of other sizes; cudaFree waits for the work that uses them
      status = cudaMalloc(&pointer, size);
    }
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      size_t available = 0;
      size_t total = 0;
      CUDA_CHECK(cudaMemGetInfo(&available, &total));
      throw CudaError("GPU " + std::to_string(device_.index) +
                          " is out of memory: " + std::to_string(size) + " bytes wanted, " +
                          std::to_string(available) + " of " + std::to_string(total) + " free, " +
                          std::to_string(pool_->in_use) + " in use by this allocator",
                      status);
    }
    CUDA_CHECK(status);
  }
  pool_->in_use += size;
  pool_->peak = std::max(pool_->peak, pool_->in_use);
  return std::shared_ptr<void>(pointer, [pool = pool_, size](void* block) {
    std::lock_guard held(pool->mutex);
    pool->free.emplace(size, block);
    pool->in_use -= size;
  });
}

size_t DeviceAllocator::bytes_in_use() const {
  std::lock_guard lock(pool_->mutex);
  return pool_->in_use;
}

size_t DeviceAllocator::peak_bytes() const {
  std::lock_guard lock(pool_->mutex);
  return pool_->peak;
}

namespace {

struct ScratchBlocks {
  struct Block {
    void* pointer = nullptr;
    size_t bytes = 0;
  };
  std::mutex mutex;
  std::map<std::tuple<int, void*, Scratch>, Block> blocks;  // by device, stream and use
};

ScratchBlocks& scratch() {
  // Never destroyed: the driver may be gone before static destructors run.
  static auto& blocks = *new ScratchBlocks();
  return blocks;
}

}  // namespace

void* workspace(const Stream& stream, Scratch use, size_t bytes) {
  std::lock_guard lock(scratch().mutex);
  ScratchBlocks::Block& block = scratch().blocks[{stream.device.index, stream.handle, use}];
  if (block.bytes < bytes) {
    const auto handle = static_cast<cudaStream_t>(stream.handle);
    if (block.pointer != nullptr) CUDA_CHECK(cudaFreeAsync(block.pointer, handle));
    block = {};
    CUDA_CHECK(cudaMallocAsync(&block.pointer, bytes, handle));
    block.bytes = bytes;
  }
  return block.pointer;
}

void release_workspace(const Stream& stream) noexcept {
  const std::lock_guard lock(scratch().mutex);
  auto& blocks = scratch().blocks;
  const int device = stream.device.index;
  const auto begin = blocks.lower_bound({device, stream.handle, Scratch::kMatmul});
  const auto end = blocks.upper_bound({device, stream.handle, Scratch::kOp});
  for (auto block = begin; block != end; ++block) {
    if (block->second.pointer == nullptr) continue;
    cudaFreeAsync(block->second.pointer, static_cast<cudaStream_t>(stream.handle));
  }
  blocks.erase(begin, end);
}

size_t workspace_bytes(int device) {
  std::lock_guard lock(scratch().mutex);
  size_t bytes = 0;
  for (const auto& [key, block] : scratch().blocks) {
    if (std::get<0>(key) == device) bytes += block.bytes;
  }
  return bytes;
}

}  // namespace muster::cuda
