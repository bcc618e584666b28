// Which probabilities dropout keeps: a pure function of the key and of where in the batch a query,
// a head and a key lie, by Philox (common/rng.h). No mask is ever stored; the backward asks again,
// and CPU and GPU give the same answer bit for bit, whatever the tiles and threads.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/rng.h"

namespace muster {

class DropoutMask {
 public:
  // Keeps everything.
  DropoutMask() = default;
  // Drops with probability p in [0, 1), rounded down to a multiple of 2⁻³². `offset` is added to
  // the rows of queries and keys.
  DropoutMask(float p, uint64_t seed, uint64_t offset)
      : rng_(seed, RandomPurpose::kDropout, 0),
        offset_(offset),
        threshold_(static_cast<uint32_t>(static_cast<double>(p) * 0x1p32)),
        scale_(static_cast<float>(1.0 / (1.0 - static_cast<double>(p)))) {}

  MUSTER_HOST_DEVICE bool active() const { return threshold_ != 0; }
  // What kept probabilities are multiplied by: 1 / (1 − p).
  MUSTER_HOST_DEVICE float scale() const { return scale_; }

  // Rows count from the first of the packed batch, not of the segment; with the offset they stay
  // below 2⁴⁸, heads below 2¹⁶. Four keys share one Philox block, a word each: the key's row
  // chooses counter and word.
  MUSTER_HOST_DEVICE bool keeps(int64_t query, int64_t head, int64_t key) const {
    const uint64_t row = offset_ + static_cast<uint64_t>(key);
    return block(query, head, row / 4).word[row % 4] >= threshold_;
  }
  // factors[j] = scale() where key `key` + j is kept, else 0; the same as keeps, a block at a time.
  void factors(float* to, int64_t query, int64_t head, int64_t key, int64_t count) const {
    PhiloxBlock words{};
    for (int64_t j = 0; j < count; ++j) {
      const uint64_t row = offset_ + static_cast<uint64_t>(key + j);
      if (j == 0 || row % 4 == 0) words = block(query, head, row / 4);
      to[j] = words.word[row % 4] >= threshold_ ? scale_ : 0.0f;
    }
  }

 private:
  MUSTER_HOST_DEVICE PhiloxBlock block(int64_t query, int64_t head, uint64_t group) const {
    return rng_.with_stream(offset_ + static_cast<uint64_t>(query))
        .block(group << 16 | static_cast<uint64_t>(head));
  }

  CounterRng rng_{0, RandomPurpose::kDropout, 0};
  uint64_t offset_ = 0;
  uint32_t threshold_ = 0;
  float scale_ = 1.0f;
};

}  // namespace muster
