#include "coordinator/save_ledger.h"

#include <fmt/format.h>

namespace muster {

SaveLedger::SaveLedger(uint64_t generation, int world) : generation_(generation), world_(world) {}

void SaveLedger::expect(int64_t step) {
  pending_[step];
}

std::optional<CompleteSave> SaveLedger::add(const proto::ShardSaved& saved) {
  const auto found = pending_.find(saved.step());
  if (saved.generation() != generation_ || saved.rank() < 0 || saved.rank() >= world_ ||
      found == pending_.end()) {
    return std::nullopt;
  }
  found->second.emplace(saved.rank(), saved);
  if (static_cast<int>(found->second.size()) < world_) return std::nullopt;
  CompleteSave complete;
  complete.step = saved.step();
  for (const auto& [rank, shard] : found->second) {
    if (!shard.error().empty() && complete.error.empty()) {
      complete.error = fmt::format("worker {}: {}", rank, shard.error());
    }
    complete.files.push_back({shard.file(), shard.bytes(), shard.xxh3()});
  }
  complete.worker_json = found->second.begin()->second.manifest_json();
  pending_.erase(found);
  return complete;
}

}  // namespace muster
