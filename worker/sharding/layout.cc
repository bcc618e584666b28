#include "worker/sharding/layout.h"

#include <algorithm>

namespace muster {

int64_t shard_size(int64_t numel, int world_size) {
  MUSTER_CHECK(numel >= 0 && world_size > 0);
  return (numel + world_size - 1) / world_size;
}

Range owned_range(int64_t numel, int world_size, int rank) {
  MUSTER_CHECK(rank >= 0 && rank < world_size);
  const int64_t n = shard_size(numel, world_size);
  return {std::min(rank * n, numel), std::min((rank + 1) * n, numel)};
}

std::vector<Transfer> plan_transfers(int64_t numel, int old_world, int new_world) {
  const int64_t old_size = shard_size(numel, old_world);
  const int64_t new_size = shard_size(numel, new_world);
  std::vector<Transfer> plan;
  for (int64_t begin = 0; begin < numel;) {
    const int64_t from = begin / old_size;
    const int64_t to = begin / new_size;
    const int64_t end = std::min({(from + 1) * old_size, (to + 1) * new_size, numel});
    plan.push_back({static_cast<int>(from), static_cast<int>(to), {begin, end}});
    begin = end;
  }
  return plan;
}

}  // namespace muster
