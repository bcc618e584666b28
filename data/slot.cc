#include "data/slot.h"

#include <fmt/format.h>

#include <limits>

#include "common/check.h"
#include "common/error.h"

namespace muster {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kPage = 4096;

int64_t round_up(int64_t bytes, int64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

template <typename T>
T* at(char* memory, int64_t offset) {
  return reinterpret_cast<T*>(memory + offset);
}

}  // namespace

SlotLayout::SlotLayout(int64_t micro_batch, int64_t sequence_length)
    : micro_batch_(micro_batch), sequence_length_(sequence_length) {
  MUSTER_CHECK(micro_batch >= 1 && sequence_length >= 1 &&
               micro_batch <= std::numeric_limits<int32_t>::max() / sequence_length);
  const int64_t tokens = micro_batch * sequence_length;
  int64_t offset = round_up(sizeof(SlotHeader), kCacheLine);
  const auto reserve = [&offset](int64_t bytes) {
    const int64_t begin = offset;
    offset = round_up(offset + bytes, kCacheLine);
    return begin;
  };
  tokens_ = reserve(tokens * 4);
  targets_ = reserve(tokens * 4);
  positions_ = reserve(tokens * 4);
  cu_seqlens_ = reserve((tokens + 1) * 4);
  ids_ = reserve(micro_batch * 8);
  bytes_ = round_up(offset, kPage);
}

Slot SlotLayout::slot(char* memory) const {
  return {at<SlotHeader>(memory, 0),        at<int32_t>(memory, tokens_),
          at<int32_t>(memory, targets_),    at<int32_t>(memory, positions_),
          at<int32_t>(memory, cu_seqlens_), at<int64_t>(memory, ids_)};
}

Batch SlotLayout::batch(const char* memory, uint64_t tag) const {
  const Slot slot = this->slot(const_cast<char*>(memory));
  const SlotHeader& header = *slot.header;
  const int64_t tokens = header.samples * sequence_length_;
  if (header.magic != kSlotMagic || header.tag != tag || header.samples < 1 ||
      header.samples > micro_batch_ || header.segments < header.samples ||
      header.segments > tokens) {
    throw PeerError(fmt::format(
        "the data service handed over a slot that holds another batch (tag {}, expected {})",
        header.tag, tag));
  }
  Batch batch;
  batch.samples = header.samples;
  batch.sequence_length = sequence_length_;
  batch.tokens = ConstTensorView(slot.tokens, DType::kInt32, {tokens});
  batch.targets = ConstTensorView(slot.targets, DType::kInt32, {tokens});
  batch.positions = ConstTensorView(slot.positions, DType::kInt32, {tokens});
  batch.cu_seqlens = ConstTensorView(slot.cu_seqlens, DType::kInt32, {header.segments + 1});
  batch.max_segment = header.max_segment;
  batch.target_tokens = header.target_tokens;
  batch.ids = {slot.ids, static_cast<size_t>(header.samples)};
  return batch;
}

}  // namespace muster
