// Takes batches from host memory to where the model computes, on a stream of its own, while earlier
// ones are still in use.
#pragma once

#include <memory>

#include "data/batch.h"
#include "kernels/runtime/runtime.h"
#include "worker/model/context.h"

namespace muster {

class BatchUpload {
 public:
  // Batches of at most `tokens` tokens (samples × sequence length).
  BatchUpload(int64_t tokens, const ComputeContext& context);

  // The batch where the context computes; work enqueued from now on finds it there. Valid until the
  // call after the next. On the CPU it is `batch` itself.
  const Batch& upload(const Batch& batch);

 private:
  // Two, by turns: one is filled while the other is in use.
  struct Slot {
    Slot(int64_t elements, const ComputeContext& context);
    Tensor host;    // [elements] int32, page-locked
    Tensor device;  // the same
    Event arrived;
    Event used;  // by all that was enqueued before the slot's turn came again
    Batch batch;
  };

  ComputeContext context_;
  std::unique_ptr<OwnedStream> copies_;
  std::unique_ptr<Slot> slots_[2];
  int turn_ = 0;
};

}  // namespace muster
