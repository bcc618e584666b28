#include "worker/train/batch_upload.h"

#include <chrono>
#include <cstring>
#include <thread>

namespace muster {

BatchUpload::Slot::Slot(int64_t elements, const ComputeContext& context)
    : host({elements}, DType::kInt32, pinned_allocator()),
      device({elements}, DType::kInt32, *context.allocator),
      arrived(context.stream.device),
      used(context.stream.device) {}

BatchUpload::BatchUpload(int64_t tokens, const ComputeContext& context) : context_(context) {
  if (context.stream.device.is_cpu()) return;
  copies_ = std::make_unique<OwnedStream>(context.stream.device);
  // Tokens, targets, positions, and at worst a segment a token.
  for (auto& slot : slots_) slot = std::make_unique<Slot>(4 * tokens + 1, context);
}

const Batch& BatchUpload::upload(const Batch& batch) {
  if (!copies_) return batch;
  Slot& slot = *slots_[turn_];
  Slot& other = *slots_[1 - turn_];
  turn_ = 1 - turn_;
  // What has been enqueued so far uses the other slot; its next turn comes after this one.
  other.used.record(context_.stream);
  // A copy of two batches ago, which comes behind what computes with earlier ones.
  while (!slot.arrived.done()) std::this_thread::sleep_for(std::chrono::microseconds(50));

  int32_t* at = slot.host.data<int32_t>();
  int64_t elements = 0;
  slot.batch = batch;
  for (ConstTensorView* view :
       {&slot.batch.tokens, &slot.batch.targets, &slot.batch.positions, &slot.batch.cu_seqlens}) {
    const int64_t n = view->numel();
    MUSTER_CHECK(elements + n <= slot.host.numel(), "a batch larger than announced");
    std::memcpy(at + elements, view->raw(), view->bytes());
    *view = slot.device.view().slice(elements, elements + n);
    elements += n;
  }
  const Stream& copies = copies_->stream();
  slot.used.hold(copies);
  copy(copies, slot.device.view().slice(0, elements), slot.host.view().slice(0, elements));
  slot.arrived.record(copies);
  slot.arrived.hold(context_.stream);
  return slot.batch;
}

}  // namespace muster
