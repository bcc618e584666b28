// Which keys a query sees: causality and a window cut a diagonal band out of a segment's scores.
// Host and device share it, so that what is computed and what is skipped are the same everywhere.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace muster {

// [begin, end); empty where begin >= end.
struct IndexRange {
  int64_t begin = 0;
  int64_t end = 0;
  MUSTER_HOST_DEVICE bool empty() const { return begin >= end; }
  bool operator==(const IndexRange&) const = default;
};

// More than any segment has keys or queries, and addable to any of their numbers in 32 bits.
constexpr int64_t kUnbounded = 1 << 30;

// Query i of a segment lies at position i + (k_count − q_count) among its keys, and sees `left`
// keys before that and `right` behind it.
struct Band {
  int64_t q_count = 0;
  int64_t k_count = 0;
  int64_t left = kUnbounded;
  int64_t right = kUnbounded;

  // Of query i, before it is cut to keys that exist.
  MUSTER_HOST_DEVICE int64_t first_key(int64_t i) const { return i + k_count - q_count - left; }
  MUSTER_HOST_DEVICE int64_t end_key(int64_t i) const { return i + k_count - q_count + right + 1; }

  // Keys that some query of [first, first + count) sees: every one of the range is seen by one.
  MUSTER_HOST_DEVICE IndexRange keys(int64_t first, int64_t count) const {
    return cut(first_key(first), end_key(first + count - 1), k_count);
  }
  // Queries that see some key of [first, first + count).
  MUSTER_HOST_DEVICE IndexRange queries(int64_t first, int64_t count) const {
    const int64_t shift = k_count - q_count;
    return cut(first - right - shift, first + count + left - shift, q_count);
  }
  // Every query of [q, q + rows) sees every key of [k, k + columns).
  MUSTER_HOST_DEVICE bool whole(int64_t q, int64_t rows, int64_t k, int64_t columns) const {
    return first_key(q + rows - 1) <= k && end_key(q) >= k + columns;
  }
  // The tiles of `tile` keys that queries [first, first + count) need, by number.
  MUSTER_HOST_DEVICE IndexRange key_tiles(int64_t first, int64_t count, int64_t tile) const {
    const IndexRange seen = keys(first, count);
    if (seen.empty()) return {};
    return {seen.begin / tile, (seen.end + tile - 1) / tile};
  }

 private:
  MUSTER_HOST_DEVICE static IndexRange cut(int64_t begin, int64_t end, int64_t count) {
    return {begin < 0 ? 0 : begin, end > count ? count : end};
  }
};

}  // namespace muster
