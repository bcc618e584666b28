// What device memory a training step needs, found by running one on the plan device: the same code
// that trains asks for the same tensors in the same order, and nothing is allocated or computed.
#pragma once

#include <cstddef>
#include <functional>

#include "common/config/config.h"
#include "common/tensor.h"
#include "worker/device/compute_device.h"

namespace muster {

// Bytes, for one worker.
struct MemoryPlan {
  size_t state = 0;  // what lasts: weights, moments, gradient sums
  size_t kept = 0;   // of that: weights and moments, which may outlive a generation
  size_t step = 0;   // at its peak, beside that: activations, gathered weights, gradients
  size_t tensors() const { return state + step; }
  size_t scratch = 0;  // a GPU's kernels, for intermediate results
  size_t network = 0;  // NCCL's buffers
  size_t total() const { return tensors() + scratch + network; }
};

// `config.model` is resolved.
MemoryPlan plan_memory(const Config& config, int rank, int world_size, DType compute_dtype);

struct ReserveOptions {
  bool connected = false;      // NCCL has its buffers already
  int more_communicators = 0;  // that are to be made beside the generation's own
  // Called as long as there is no room: gives up something of the device, or returns false.
  std::function<bool()> make_room = {};
};
// Gives a GPU worker all its tensors' memory at once; keeps what it has reserved, if that is
// enough. Throws Error saying how much was needed and for what, how much is there, and which
// settings lower it.
void reserve_memory(ComputeDevice& device, const Config& config, int rank, int world_size,
                    const ReserveOptions& options = {});

}  // namespace muster
