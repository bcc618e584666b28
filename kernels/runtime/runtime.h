// What a program needs of a device beside its kernels: streams, events and copies. On the CPU (and
// the plan device) everything has happened when a call returns. Errors of the GPU are CudaErrors
// (kernels/cuda/check.h).
#pragma once

#include <memory>
#include <stop_token>

#include "common/tensor.h"

namespace muster {

// The calling thread works on this device from now on.
void use_device(Device device);

// A stream of its own. Work on it is ordered against no other stream's but by events.
class OwnedStream {
 public:
  explicit OwnedStream(Device device);
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  const Stream& stream() const { return stream_; }

 private:
  Stream stream_;
};

// A point in a stream's work.
class Event {
 public:
  explicit Event(Device device);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(const Stream& stream);
  // What was recorded last has happened; true if nothing was.
  bool done() const;
  // Later work on `stream` waits for what was recorded last.
  void hold(const Stream& stream) const;

 private:
  Device device_;
  void* handle_ = nullptr;  // cudaEvent_t
};

// Copies between views of equal dtype and size, contiguous, each in host memory or on the stream's
// device. Only enqueued when the host memory is page-locked.
void copy(const Stream& stream, TensorView to, ConstTensorView from);

// Returns when everything enqueued has happened. For the ends of runs and for tests: a step waits
// for events, under a deadline.
void synchronize(const Stream& stream);

// GPUs that this process can see; 0 without a driver, or built without CUDA.
int gpu_count();

// Bytes free on the current GPU.
size_t free_memory(Device device);

// A device's memory, taken when asked for and kept until the process ends.
std::shared_ptr<Allocator> device_allocator(Device device);
struct DeviceMemory {
  size_t peak = 0;     // most that tensors have held at a time
  size_t scratch = 0;  // held for kernels' intermediate results
};
// `allocator`: of device_allocator.
DeviceMemory memory_of(const Allocator& allocator);

// Page-locked host memory for copies from and to GPUs; plain host memory without one. Freed blocks
// are kept for the next request of their size.
Allocator& pinned_allocator();

// [bytes] uint8 of host memory for copies from and to `device`: page-locked for a GPU, which should
// be the calling thread's. For buffers of GBs, that take seconds to make: most of that is not spent
// inside of the driver, where it would hold others up. It goes back to the system with its last
// owner. Undefined if `stop` was requested meanwhile. Throws CudaError (or Error) where there is
// not enough of it.
Tensor host_buffer(Device device, int64_t bytes, const std::stop_token& stop = {});

}  // namespace muster
