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
  std::map<int, CheckpointFile> parts;
  for (const auto& [rank, shard] : found->second) {
    std::string error = shard.error();
    if (shard.part() < 0 || shard.part() >= world_ || parts.contains(shard.part())) {
      error =
          fmt::format("part {} of the layout is out of range or another worker's", shard.part());
    }
    if (!error.empty() && complete.error.empty()) {
      complete.error = fmt::format("worker {}: {}", rank, error);
    }
    parts[shard.part()] = {shard.file(), shard.bytes(), shard.xxh3()};
  }
  for (const auto& [part, file] : parts) complete.files.push_back(file);
  complete.worker_json = found->second.begin()->second.manifest_json();
  pending_.erase(found);
  return complete;
}

std::vector<int64_t> SaveLedger::give_up() {
  std::vector<int64_t> steps;
  for (const auto& [step, shards] : pending_) steps.push_back(step);
  pending_.clear();
  return steps;
}

}  // namespace muster
