// How one micro-batch lies in a slot of the shared ring. Service and worker compute the same layout
// from (micro_batch, sequence_length); every array begins on a cache line.
//
// No atomics and no checksum: a slot belongs to the worker until its BatchRequest names it, then to
// the service until its BatchReady, and those messages order the memory accesses. The tag in the
// header tells a slot that was not filled for this request.
#pragma once

#include <cstdint>

#include "data/batch.h"

namespace muster {

struct SlotHeader {
  uint64_t magic = 0;
  uint64_t tag = 0;  // BatchRequest.tag; written last
  int64_t samples = 0;
  int64_t segments = 0;
  int64_t max_segment = 0;
  int64_t target_tokens = 0;
};

// Pointers into one slot, for writing.
struct Slot {
  SlotHeader* header;
  int32_t* tokens;      // [micro_batch × sequence_length]
  int32_t* targets;     // [micro_batch × sequence_length]
  int32_t* positions;   // [micro_batch × sequence_length]
  int32_t* cu_seqlens;  // [micro_batch × sequence_length + 1]: each token may be its own segment
  int64_t* ids;         // [micro_batch]
};

class SlotLayout {
 public:
  // Both at least 1; micro_batch × sequence_length below 2^31 (cu_seqlens is int32).
  SlotLayout(int64_t micro_batch, int64_t sequence_length);

  int64_t micro_batch() const { return micro_batch_; }
  int64_t sequence_length() const { return sequence_length_; }
  // Bytes of a slot, a multiple of the page size.
  int64_t bytes() const { return bytes_; }

  // `memory` is where the slot begins.
  Slot slot(char* memory) const;
  // What the service wrote for `tag`. Throws PeerError when the slot holds something else.
  Batch batch(const char* memory, uint64_t tag) const;

 private:
  int64_t micro_batch_;
  int64_t sequence_length_;
  int64_t tokens_, targets_, positions_, cu_seqlens_, ids_;  // offsets
  int64_t bytes_;
};

constexpr uint64_t kSlotMagic = 0x4D55535445522D31;  // "MUSTER-1"

}  // namespace muster
