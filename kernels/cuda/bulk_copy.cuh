// Bulk copies from global to shared memory by the copy engine, and the mbarriers that they complete
// on (sm_90). Code for older GPUs compiles to nothing: the host does not launch it there.
#pragma once

#include <cstdint>

#include "kernels/cuda/copy_async.cuh"

namespace muster::cuda {

using BulkBarrier = uint64_t;  // in shared memory

// By one thread; the others may use the barrier after publish_bulk_barriers() by the same thread
// and a block barrier.
__device__ inline void init_bulk_barrier(BulkBarrier* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
#endif
}
__device__ inline void publish_bulk_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// The barrier's phase ends when `bytes` have arrived.
__device__ inline void expect_bulk_bytes(BulkBarrier* barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

// Both addresses and `bytes` are multiples of 16.
__device__ inline void copy_bulk(void* to, const void* from, uint32_t bytes, BulkBarrier* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}

// Waits for the end of the barrier's phase; phases have parity 0, 1, 0, …
__device__ inline void wait_bulk(BulkBarrier* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
#endif
}

}  // namespace muster::cuda
