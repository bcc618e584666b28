// One micro-batch, as it lies in a ring slot: what the data service writes and the model reads in
// place.
#pragma once

#include <cstdint>
#include <span>

#include "common/tensor.h"

namespace muster {

// Target of a token that is not learned from (the last token of a document, padding).
constexpr int32_t kIgnoredTarget = -1;

// Views into memory that stays valid until the batch is released. N = samples × sequence_length
// tokens, sample after sample.
struct Batch {
  int64_t samples = 0;
  int64_t sequence_length = 0;
  ConstTensorView tokens;     // [N] int32
  ConstTensorView targets;    // [N] int32: the token that follows, or kIgnoredTarget
  ConstTensorView positions;  // [N] int32: index inside the token's document segment, from 0
  ConstTensorView
      cu_seqlens;  // [segments + 1] int32: where each document segment begins; the last entry is N
  int64_t max_segment = 0;       // tokens of the longest segment
  int64_t target_tokens = 0;     // targets that count
  std::span<const int64_t> ids;  // global sample ids, [samples]
};

}  // namespace muster
