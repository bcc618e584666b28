#include "worker/train/batch_stream.h"

#include <algorithm>
#include <numeric>

namespace muster {

void BatchStream::plan(Split split, std::vector<std::vector<int64_t>> batches) {
  for (auto& samples : batches) {
    has_samples_.push_back(!samples.empty());
    if (!samples.empty()) wanted_.emplace_back(split, std::move(samples));
  }
  request_ahead();
}

const Batch& BatchStream::next(const Batch& empty, Deadline deadline) {
  MUSTER_CHECK(!has_samples_.empty(), "more batches taken than planned");
  const bool has_samples = has_samples_.front();
  has_samples_.pop_front();
  return has_samples ? client_.next(deadline) : empty;
}

void BatchStream::release(const Batch& batch) {
  if (batch.ids.empty()) return;
  client_.release(batch);
  request_ahead();
}

void BatchStream::request_ahead() {
  while (!wanted_.empty() && client_.free_slots() > 0) {
    client_.request(wanted_.front().first, wanted_.front().second);
    wanted_.pop_front();
  }
}

EmptyBatch::EmptyBatch(int64_t sequence_length)
    : tokens_(Tensor::zeros({sequence_length}, DType::kInt32)),
      targets_({sequence_length}, DType::kInt32),
      positions_({sequence_length}, DType::kInt32),
      cu_seqlens_({2}, DType::kInt32) {
  std::fill_n(targets_.data<int32_t>(), sequence_length, kIgnoredTarget);
  std::iota(positions_.data<int32_t>(), positions_.data<int32_t>() + sequence_length, 0);
  cu_seqlens_.data<int32_t>()[0] = 0;
  cu_seqlens_.data<int32_t>()[1] = static_cast<int32_t>(sequence_length);
  batch_ = {.samples = 1,
            .sequence_length = sequence_length,
            .tokens = tokens_,
            .targets = targets_,
            .positions = positions_,
            .cu_seqlens = cu_seqlens_,
            .max_segment = sequence_length,
            .target_tokens = 0,
            .ids = {}};
}

}  // namespace muster
