// Who owns which elements: a pure function of (units, world size). Every element has one global
// index inside its unit; the flat unit is padded to W · n and rank r owns [r · n, (r + 1) · n), cut
// off at the unit's size. Any W works; a rank may own nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "worker/model/parameters.h"

namespace muster {

// Elements [begin, end) of a flat unit.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

// Elements per rank (the same for all, padding included) of a unit of `numel` elements.
int64_t shard_size(int64_t numel, int world_size);
// What rank owns, without padding; empty for ranks past the end.
Range owned_range(int64_t numel, int world_size, int rank);

// A piece of a shard as it must travel from an old layout to a new one.
struct Transfer {
  int from_rank = 0;
  int to_rank = 0;
  Range range;  // of the flat unit
};
// Every element of a unit exactly once, from its owner among `old_world` to its owner among
// `new_world`, ascending.
std::vector<Transfer> plan_transfers(int64_t numel, int old_world, int new_world);

}  // namespace muster
