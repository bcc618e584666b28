// Where a worker computes: the CPU or one GPU, the stream and memory it has there, and in which
// type it computes.
#pragma once

#include <memory>

#include "common/arena.h"
#include "common/config/config.h"
#include "kernels/runtime/runtime.h"
#include "worker/model/context.h"

namespace muster {

// run.device for the worker `local_rank` of its node: its GPU of that number, where there are any.
// Throws ConfigError when the node has GPUs but not one for every worker, Error naming the GPU that
// cannot be used and why.
Device choose_device(const RunConfig& run, int local_rank);

// precision.compute on that device. Throws ConfigError for what the device cannot do.
DType choose_compute_dtype(const Config& config, Device device);

class ComputeDevice {
 public:
  // Makes the device current for this thread.
  ComputeDevice(Device device, DType dtype);
  // precision.matmul and run.deterministic. Throws ConfigError naming a GPU that has no float8.
  void configure(const Config& config);

  // Bytes of the device for tensors, taken at once: `kept` for what may outlive a generation
  // (ComputeContext::state_allocator), `rest` for everything else. Without it (on the CPU always)
  // memory is taken as needed. What was reserved before is given back first. Throws Error with what
  // is free when it is not there.
  void reserve(size_t kept, size_t rest);
  // No tensor may lie in the rest. One that lies in what is kept stays, with all the memory that
  // was kept with it, until it goes.
  void give_back();
  // So much is reserved, and nothing lies in it.
  bool is_reserved(size_t kept, size_t rest) const;
  // Requests that found no room in what was reserved.
  int64_t overflows() const { return kept_.overflows() + rest_.overflows(); }
  // Of the device, for whomever asks first.
  size_t free_bytes() const;
  const ComputeContext& context() const { return context_; }
  // FLOP/s of bfloat16 products that its maker states for the device; 0: not known.
  double peak_flops() const { return peak_flops_; }
  // What kernels hold of it for intermediate results.
  size_t scratch_bytes() const;
  // Most memory of the device that has been held at a time.
  size_t peak_bytes() const;

 private:
  // A range of the device's memory, and the allocator that it is from and falls back on.
  struct Reserve {
    std::shared_ptr<Allocator> memory;
    std::shared_ptr<Arena> arena;  // null: nothing is reserved
    size_t bytes = 0;

    void take(size_t size);
    bool empty() const { return !arena || arena->bytes_in_use() == 0; }
    int64_t overflows() const { return arena ? arena->overflows() : 0; }
  };

  OwnedStream stream_;
  Reserve kept_;
  Reserve rest_;
  size_t peak_ = 0;       // before this reserve
  size_t lingering_ = 0;  // what was kept before it and lay there still
  double peak_flops_ = 0.0;
  ComputeContext context_;
};

}  // namespace muster
