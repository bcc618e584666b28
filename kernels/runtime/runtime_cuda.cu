#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>

#include "kernels/cuda/check.h"
#include "kernels/cuda/device.h"
#include "kernels/runtime/mapped_memory.h"
#include "kernels/runtime/runtime_cuda.h"

namespace muster::cuda {
namespace {

cudaStream_t stream_of(void* handle) {
  return static_cast<cudaStream_t>(handle);
}
cudaEvent_t event_of(void* handle) {
  return static_cast<cudaEvent_t>(handle);
}

// From this size on cudaHostAlloc, which clears one page after the other while it holds the driver,
// takes longer than training can wait.
constexpr size_t kBigBlock = size_t{64} << 20;

std::shared_ptr<void> small_block(size_t bytes) {
  void* block = nullptr;
  CUDA_CHECK(cudaHostAlloc(&block, bytes, cudaHostAllocPortable));
  return {block, [](void* p) {
            if (cudaFreeHost(p) != cudaSuccess) cudaGetLastError();
          }};
}

// Memory that the driver has locked piece by piece, so that it is never held for long. A copy must
// not cross from one piece into the next.
class LockedInPieces {
 public:
  explicit LockedInPieces(size_t bytes) : memory_(bytes) {}
  ~LockedInPieces() {
    {
      const std::lock_guard lock(known().mutex);
      known().blocks.erase(begin());
    }
    // At the end of the process the driver may be gone before the last block.
    for (size_t at = 0; at < locked_; at += kPiece) {
      if (cudaHostUnregister(begin() + at) != cudaSuccess) cudaGetLastError();
    }
  }
  LockedInPieces(const LockedInPieces&) = delete;
  LockedInPieces& operator=(const LockedInPieces&) = delete;

  char* begin() const { return static_cast<char*>(memory_.data()); }

  // The driver only has to lock the pages: they are there. False if `stop` was requested meanwhile.
  bool lock(const std::stop_token& stop) {
    if (!memory_.touch(stop)) return false;
    for (; locked_ < memory_.bytes(); locked_ += kPiece) {
      if (stop.stop_requested()) return false;
      const size_t size = std::min(kPiece, memory_.bytes() - locked_);
      const cudaError_t status =
          cudaHostRegister(begin() + locked_, size, cudaHostRegisterPortable);
      if (status != cudaSuccess) {
        const std::string what = "cudaHostRegister of " + std::to_string(size) + " bytes, " +
                                 std::to_string(locked_) + " into a buffer of " +
                                 std::to_string(memory_.bytes());
        throw_cuda_error(__FILE__, __LINE__, what.c_str(), status);
      }
    }
    const std::lock_guard lock(known().mutex);
    known().blocks.emplace(begin(), memory_.bytes());
    return true;
  }

  // How many of the bytes from `at` on lie in one piece; all where it is no such memory.
  static size_t in_one_piece(const void* at, size_t bytes) {
    const std::shared_lock lock(known().mutex);
    const auto* const place = static_cast<const char*>(at);
    const auto after = known().blocks.upper_bound(place);
    if (after == known().blocks.begin()) return bytes;
    const auto& [begin, size] = *std::prev(after);
    const auto offset = static_cast<size_t>(place - begin);
    return offset < size ? std::min(bytes, kPiece - offset % kPiece) : bytes;
  }

 private:
  static constexpr size_t kPiece = size_t{256} << 20;
  struct Known {
    std::shared_mutex mutex;
    std::map<const char*, size_t> blocks;
  };
  static Known& known() {
    static auto& all = *new Known();  // outlives the last block
    return all;
  }

  MappedMemory memory_;
  size_t locked_ = 0;
};

std::shared_ptr<void> big_block(size_t bytes, const std::stop_token& stop) {
  auto memory = std::make_shared<LockedInPieces>(bytes);
  if (!memory->lock(stop)) return nullptr;
  return {memory, memory->begin()};
}

// Keeps freed blocks for the next request of their size: page-locking is slow.
class PinnedAllocator : public Allocator {
 public:
  Device device() const override { return Device::cpu(); }
  std::shared_ptr<void> allocate(size_t bytes) override {
    const size_t size = std::max<size_t>(bytes, 1);
    std::shared_ptr<void> block;
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = idle_.find(size); found != idle_.end()) {
        block = std::move(found->second);
        idle_.erase(found);
      }
    }
    if (!block) block = page_locked_memory(size, {});
    void* const start = block.get();
    return {start, [this, size, block = std::move(block)](void* /*start*/) mutable {
              const std::lock_guard lock(mutex_);
              idle_.emplace(size, std::move(block));
            }};
  }

 private:
  std::mutex mutex_;
  std::multimap<size_t, std::shared_ptr<void>> idle_;
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
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  while (bytes > 0) {
    const size_t size = std::min(LockedInPieces::in_one_piece(target, bytes),
                                 LockedInPieces::in_one_piece(source, bytes));
    CUDA_CHECK(cudaMemcpyAsync(target, source, size, cudaMemcpyDefault, stream_of(stream)));
    target += size;
    source += size;
    bytes -= size;
  }
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

std::shared_ptr<void> page_locked_memory(size_t bytes, const std::stop_token& stop) {
  return bytes < kBigBlock ? small_block(bytes) : big_block(bytes, stop);
}

Allocator* pinned_allocator() {
  // Never destroyed: the driver may be gone before static destructors run.
  static Allocator* const allocator = device_count() > 0 ? new PinnedAllocator() : nullptr;
  return allocator;
}

}  // namespace muster::cuda
