// Contiguous, near-equal slices: how the samples of a step are dealt to workers, and a worker's
// samples to micro-batches.
#pragma once

#include <algorithm>
#include <cstdint>

namespace muster {

struct Slice {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Slice&) const = default;
};

// Part `part` of `parts` of [0, count): the first count % parts parts have one item more.
inline Slice slice_of(int64_t count, int64_t part, int64_t parts) {
  const int64_t share = count / parts;
  const int64_t extra = count % parts;
  const int64_t begin = share * part + std::min(part, extra);
  return {begin, begin + share + (part < extra ? 1 : 0)};
}

}  // namespace muster
