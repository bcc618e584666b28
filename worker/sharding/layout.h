// Who owns which elements: a pure function of (units, world size). Every element has one global
// index inside its unit; the flat unit is padded to W · n and part r is [r · n, (r + 1) · n), cut
// off at the unit's size. Any W works; a part may be empty. Part r is owned by rank r, unless shard
// groups are smaller than the world (Placement).
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

// Where a rank stands when shard groups of G consecutive ranks each hold everything: W / G replicas
// of the same state. A rank holds one G-th of it, which are W / G consecutive parts of the layout
// for W ranks; of these, one is its own among the ranks that hold the same.
struct Placement {
  int world_size = 1;
  int rank = 0;
  int shard_group = 1;  // G, divides world_size

  int replicas() const { return world_size / shard_group; }
  int member() const { return rank % shard_group; }   // which G-th
  int replica() const { return rank / shard_group; }  // which shard group
  // Every rank has another one. The rank itself when all are one group, or everyone its own.
  int part() const { return member() * replicas() + replica(); }
};

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
