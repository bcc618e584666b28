#include "kernels/runtime/runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "kernels/runtime/runtime_cuda.h"

namespace muster {
namespace {

void check_place(const Stream& stream, const Device& device) {
  MUSTER_CHECK(device.is_cpu() || device == stream.device);
}

// One block of host memory, and no more: what a tensor is made of.
class OneBlock : public Allocator {
 public:
  explicit OneBlock(std::shared_ptr<void> block) : block_(std::move(block)) {}
  Device device() const override { return Device::cpu(); }
  std::shared_ptr<void> allocate(size_t /*bytes*/) override { return std::move(block_); }

 private:
  std::shared_ptr<void> block_;
};

std::shared_ptr<void> plain_memory(size_t bytes) {
  constexpr size_t kAlignment = 4096;
  void* block = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (block == nullptr) throw std::bad_alloc();
  return {block, [](void* p) { std::free(p); }};
}

}  // namespace

void use_device(Device device) {
  if (device.is_cuda()) cuda::use_device(device.index);
}

OwnedStream::OwnedStream(Device device) : stream_{device, nullptr} {
  if (device.is_cuda()) stream_.handle = cuda::create_stream();
}
OwnedStream::~OwnedStream() {
  if (stream_.handle != nullptr) cuda::destroy_stream(stream_);
}

Event::Event(Device device) : device_(device) {
  if (device.is_cuda()) handle_ = cuda::create_event();
}
Event::~Event() {
  if (handle_ != nullptr) cuda::destroy_event(handle_);
}

void Event::record(const Stream& stream) {
  MUSTER_CHECK(stream.device == device_);
  if (handle_ != nullptr) cuda::record_event(handle_, stream.handle);
}

bool Event::done() const {
  return handle_ == nullptr || cuda::event_done(handle_);
}

void Event::hold(const Stream& stream) const {
  MUSTER_CHECK(stream.device == device_);
  if (handle_ != nullptr) cuda::hold_stream(stream.handle, handle_);
}

void copy(const Stream& stream, TensorView to, ConstTensorView from) {
  MUSTER_CHECK(to.dtype() == from.dtype() && to.numel() == from.numel() && to.contiguous() &&
                   from.contiguous(),
               to.shape().to_string() + " from " + from.shape().to_string());
  check_place(stream, to.device());
  check_place(stream, from.device());
  if (to.numel() == 0 || to.raw() == from.raw()) return;
  if (stream.device.is_cuda()) {
    cuda::copy_bytes(stream.handle, to.raw(), from.raw(), to.bytes());
  } else if (stream.device.is_cpu()) {
    std::memcpy(to.raw(), from.raw(), to.bytes());
  }
}

void synchronize(const Stream& stream) {
  if (stream.device.is_cuda()) cuda::synchronize_stream(stream.handle);
}

int gpu_count() {
#ifdef MUSTER_WITH_CUDA
  return cuda::device_count();
#else
  return 0;
#endif
}

size_t free_memory(Device device) {
  MUSTER_CHECK(device.is_cuda());
  return cuda::free_memory();
}

std::shared_ptr<Allocator> device_allocator(Device device) {
  if (device.is_cuda()) return cuda::device_allocator(device.index);
  MUSTER_CHECK(device.is_cpu());
  return {std::shared_ptr<void>(), &host_allocator()};
}

DeviceMemory memory_of(const Allocator& allocator) {
  if (allocator.device().is_cuda()) return cuda::memory_of(allocator);
  return {dynamic_cast<const HostAllocator&>(allocator).peak_bytes(), 0};
}

Allocator& pinned_allocator() {
#ifdef MUSTER_WITH_CUDA
  if (Allocator* pinned = cuda::pinned_allocator()) return *pinned;
#endif
  return host_allocator();
}

Tensor host_buffer(Device device, int64_t bytes, const std::stop_token& stop) {
  const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
  OneBlock block(device.is_cuda() ? cuda::page_locked_memory(size, stop) : plain_memory(size));
  return {{std::max<int64_t>(bytes, 1)}, DType::kUInt8, block};
}

}  // namespace muster
