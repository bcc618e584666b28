#include <map>
#include <mutex>

#include "kernels/cuda/check.h"
#include "kernels/cuda/device.h"
#include "kernels/runtime/runtime_cuda.h"

namespace muster::cuda {
namespace {

cudaStream_t stream_of(void* handle) {
  return static_cast<cudaStream_t>(handle);
}
cudaEvent_t event_of(void* handle) {
  return static_cast<cudaEvent_t>(handle);
}

// Keeps freed blocks for the next request of their size: page-locking is slow.
class PinnedAllocator : public Allocator {
 public:
  Device device() const override { return Device::cpu(); }
  std::shared_ptr<void> allocate(size_t bytes) override {
    const size_t size = std::max<size_t>(bytes, 1);
    const std::lock_guard lock(mutex_);
    void* block = nullptr;
    if (const auto found = idle_.find(size); found != idle_.end()) {
      block = found->second;
      idle_.erase(found);
    } else {
      CUDA_CHECK(cudaHostAlloc(&block, size, cudaHostAllocPortable));
    }
    return std::shared_ptr<void>(block, [this, size](void* p) {
      const std::lock_guard held(mutex_);
      idle_.emplace(size, p);
    });
  }

 private:
  std::mutex mutex_;
  std::multimap<size_t, void*> idle_;
};

}  // namespace

void use_device(int index) {
  CUDA_CHECK(cudaSetDevice(index));
}

void* create_stream() {
  cudaStream_t stream = nullptr;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

void destroy_stream(const Stream& stream) noexcept {
  release_workspace(stream);
  cudaStreamDestroy(stream_of(stream.handle));
}

void* create_event() {
  cudaEvent_t event = nullptr;
  CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

void destroy_event(void* event) noexcept {
  cudaEventDestroy(event_of(event));
}

void record_event(void* event, void* stream) {
  CUDA_CHECK(cudaEventRecord(event_of(event), stream_of(stream)));
}

bool event_done(void* event) {
  const cudaError_t status = cudaEventQuery(event_of(event));
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  CUDA_CHECK(status);
  return true;
}

void hold_stream(void* stream, void* event) {
  CUDA_CHECK(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0));
}

void copy_bytes(void* stream, void* to, const void* from, size_t bytes) {
  CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)));
}

void synchronize_stream(void* stream) {
  CUDA_CHECK(cudaStreamSynchronize(stream_of(stream)));
}

size_t free_memory() {
  size_t available = 0;
  size_t total = 0;
  CUDA_CHECK(cudaMemGetInfo(&available, &total));
  return available;
}

std::shared_ptr<Allocator> device_allocator(int index) {
  return std::make_shared<DeviceAllocator>(index);
}

DeviceMemory memory_of(const Allocator& allocator) {
  return {dynamic_cast<const DeviceAllocator&>(allocator).peak_bytes(),
          workspace_bytes(allocator.device().index)};
}

Allocator* pinned_allocator() {
  // Never destroyed: the driver may be gone before static destructors run.
  static Allocator* const allocator = device_count() > 0 ? new PinnedAllocator() : nullptr;
  return allocator;
}

}  // namespace muster::cuda
