// Gathers the shards that the ranks have written for a checkpoint. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/protocol/muster.pb.h"
#include "coordinator/checkpoints.h"

namespace muster {

struct CompleteSave {
  int64_t step = 0;
  std::string error;                  // not empty: a rank could not write, and which and why
  std::vector<CheckpointFile> files;  // by part of the layout
  std::string worker_json;            // rank 0's part of the manifest
};

class SaveLedger {
 public:
  SaveLedger(uint64_t generation, int world);
  void expect(int64_t step);
  // The save this shard completes, if it does. A shard nobody asked for is ignored.
  std::optional<CompleteSave> add(const proto::ShardSaved& saved);
  bool empty() const { return pending_.empty(); }
  // Expects nothing any more; returns the steps that were not complete.
  std::vector<int64_t> give_up();

 private:
  uint64_t generation_;
  int world_;
  std::map<int64_t, std::map<int, proto::ShardSaved>> pending_;  // step, rank
};

}  // namespace muster
