// One unit as one flat vector: its padded size at a world size, what of it this rank holds, the
// parameters inside it, and which of its elements decay.
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
  FlatUnit(UnitSpec unit, const Placement& placement);

  UnitSpec spec;
  int64_t numel;
  int64_t part;    // elements of a part of the layout, padding included
  int64_t shard;   // elements that this rank holds, padding included: replicas · part
  int64_t room;    // what it takes in buffers of all units: `shard`, so that the next is aligned
  int64_t padded;  // shard group · shard
  int64_t begin;   // first element of this rank's shard of the padded unit
  Range owned;     // the same without padding
  Range saved;     // this rank's part of the layout, inside of `owned`, without padding

  // This rank's shard [shard] of a padded buffer [padded].
  TensorView own_shard(TensorView padded_unit) const {
    return padded_unit.slice(begin, begin + shard);
  }
  // One view a parameter of a buffer [at least numel].
  std::vector<TensorView> parameters(TensorView flat) const;
  // The elements of `range` by weight decay; indices count from range.begin.
  std::vector<AdamwSegment> segments(Range range, double weight_decay) const;
};

}  // namespace muster
