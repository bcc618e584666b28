// The CUDA half of runtime.h. Handles are cudaStream_t and cudaEvent_t.
#pragma once

#include <cstddef>

#include "common/check.h"
#include "common/tensor.h"
#include "kernels/runtime/runtime.h"

namespace muster::cuda {

#ifdef MUSTER_WITH_CUDA

void use_device(int index);
void* create_stream();
// With the scratch memory that kernels hold for it.
void destroy_stream(const Stream& stream) noexcept;
void* create_event();
void destroy_event(void* event) noexcept;
void record_event(void* event, void* stream);
bool event_done(void* event);
void hold_stream(void* stream, void* event);
void copy_bytes(void* stream, void* to, const void* from, size_t bytes);
void synchronize_stream(void* stream);
int device_count();
size_t free_memory();
std::shared_ptr<Allocator> device_allocator(int index);
DeviceMemory memory_of(const Allocator& allocator);
// Null without a GPU.
Allocator* pinned_allocator();
// Goes back to the system with its last owner. Null if `stop` was requested meanwhile.
std::shared_ptr<void> page_locked_memory(size_t bytes, const std::stop_token& stop);

#else

// Without CUDA nothing makes a CUDA device, so nobody comes here.
[[noreturn]] inline void absent() {
  MUSTER_CHECK(false, "built without CUDA: cmake with -DMUSTER_CUDA=ON");
}
inline void use_device(int /*index*/) {
  absent();
}
inline void* create_stream() {
  absent();
}
inline void destroy_stream(const Stream& /*stream*/) noexcept {
  absent();
}
inline void* create_event() {
  absent();
}
inline void destroy_event(void* /*event*/) noexcept {
  absent();
}
inline void record_event(void* /*event*/, void* /*stream*/) {
  absent();
}
inline bool event_done(void* /*event*/) {
  absent();
}
inline void hold_stream(void* /*stream*/, void* /*event*/) {
  absent();
}
inline void copy_bytes(void* /*stream*/, void* /*to*/, const void* /*from*/, size_t /*bytes*/) {
  absent();
}
inline void synchronize_stream(void* /*stream*/) {
  absent();
}
inline size_t free_memory() {
  absent();
}
inline std::shared_ptr<Allocator> device_allocator(int /*index*/) {
  absent();
}
inline DeviceMemory memory_of(const Allocator& /*allocator*/) {
  absent();
}
inline std::shared_ptr<void> page_locked_memory(size_t /*bytes*/, const std::stop_token& /*stop*/) {
  absent();
}

#endif

}  // namespace muster::cuda
