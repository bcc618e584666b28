#include "worker/sharding/flat_unit.h"

#include <algorithm>
#include <utility>

#include "common/error.h"

namespace muster {
namespace {

constexpr int64_t kAlignment = 128;  // elements: 256 bytes of bfloat16, which suits every kernel

}  // namespace

ShardMode parse_shard_mode(const std::string& text) {
  if (text == "full") return ShardMode::kFull;
  if (text == "grad") return ShardMode::kGrad;
  if (text == "optimizer") return ShardMode::kOptimizer;
  if (text == "none") return ShardMode::kNone;
  throw ConfigError("parallel.shard = \"" + text +
                    "\" is not known; use \"full\", \"grad\", \"optimizer\" or \"none\"");
}

FlatUnit::FlatUnit(UnitSpec unit, const Placement& placement)
    : spec(std::move(unit)),
      numel(spec.numel()),
      part(shard_size(numel, placement.world_size)),
      shard(part * placement.replicas()),
      room((shard + kAlignment - 1) / kAlignment * kAlignment),
      padded(part * placement.world_size),
      begin(shard * placement.member()),
      owned{std::min(begin, numel), std::min(begin + shard, numel)},
      saved(owned_range(numel, placement.world_size, placement.part())) {}

std::vector<TensorView> FlatUnit::parameters(TensorView flat) const {
  std::vector<TensorView> views;
  views.reserve(spec.parameters.size());
  int64_t offset = 0;
  for (const ParameterSpec& parameter : spec.parameters) {
    const int64_t end = offset + parameter.shape.numel();
    views.push_back(flat.slice(offset, end).reshape(parameter.shape));
    offset = end;
  }
  return views;
}

std::vector<AdamwSegment> FlatUnit::segments(Range range, double weight_decay) const {
  std::vector<AdamwSegment> segments;
  int64_t offset = 0;
  for (const ParameterSpec& parameter : spec.parameters) {
    const int64_t end = offset + parameter.shape.numel();
    const int64_t first = std::max(offset, range.begin) - range.begin;
    const int64_t last = std::min(end, range.end) - range.begin;
    const float decay = parameter.decay ? static_cast<float>(weight_decay) : 0.0f;
    offset = end;
    if (first >= last) continue;
    if (!segments.empty() && segments.back().weight_decay == decay) {
      segments.back().end = last;
    } else {
      segments.push_back({first, last, decay});
    }
  }
  return segments;
}

}  // namespace muster
