// The GPU as a place: which are there, their memory, and the scratch memory of kernels.
//
// Threads: a kernel runs on the calling thread's current device, which must be that of its stream
// (cudaSetDevice once when a worker starts).
#pragma once

#include <memory>

#include "common/tensor.h"

namespace muster::cuda {

// Number of usable GPUs; 0 without a driver or without a GPU.
int device_count();

// Streaming multiprocessors of the current device.
int multiprocessors();

// Device memory that keeps freed blocks for the next request of the same size, so that a training
// step allocates nothing after the first. A block given back may still be in use by work enqueued
// earlier: all work on an allocator's blocks goes to one stream, or the caller orders its streams.
// Throws CudaError with the bytes wanted and free when the device is full. Thread-safe.
class DeviceAllocator : public Allocator {
 public:
  explicit DeviceAllocator(int device);
  ~DeviceAllocator() override;
  std::shared_ptr<void> allocate(size_t bytes) override;
  Device device() const override { return device_; }
  size_t bytes_in_use() const;
  size_t peak_bytes() const;

 private:
  struct Pool;
  Device device_;
  std::shared_ptr<Pool> pool_;
};

// Scratch memory of kernels: one block for each stream and use, grown to the largest request and
// kept, so kernels on one stream share it in stream order. Growing is stream-ordered
// (cudaMallocAsync) and never synchronises; whoever wants no allocation at all inside a step makes
// the largest request before it. kMatmul belongs to cuBLASLt, kOp to the op that is being called:
// an op that calls another (cross-entropy calls matmul) may hold only a kind the other leaves
// alone.
enum class Scratch { kMatmul, kColumnSums, kOp };
void* workspace(const Stream& stream, Scratch use, size_t bytes);
// Gives back what workspace() holds for the stream, which is about to go.
void release_workspace(const Stream& stream) noexcept;
// All that workspace() holds on a device.
size_t workspace_bytes(int device);

}  // namespace muster::cuda
