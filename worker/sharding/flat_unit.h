// One unit as one flat vector: its padded size at a world size, the parameters inside it, and which
// of its elements decay.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/adamw/adamw.h"
#include "worker/model/parameters.h"
#include "worker/sharding/layout.h"

namespace muster {

// parallel.shard.
enum class ShardMode { kFull, kGrad, kOptimizer, kNone };
// Throws ConfigError naming the modes.
ShardMode parse_shard_mode(const std::string& text);

struct FlatUnit {
  FlatUnit(UnitSpec unit, int world_size, int rank);

  UnitSpec spec;
  int64_t numel;
  int64_t shard;   // elements per rank, padding included
  int64_t padded;  // world size · shard
  int64_t begin;   // first element of this rank's part of the padded unit
  Range owned;     // the same without padding

  // This rank's part [shard] of a padded buffer [padded].
  TensorView own_part(TensorView padded_unit) const {
    return padded_unit.slice(begin, begin + shard);
  }
  // One view a parameter of a buffer [at least numel].
  std::vector<TensorView> parameters(TensorView flat) const;
  // The elements of `range` by weight decay; indices count from range.begin.
  std::vector<AdamwSegment> segments(Range range, double weight_decay) const;
};

}  // namespace muster
