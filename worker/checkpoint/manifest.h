// The worker's part of manifest.json, beside the coordinator's (coordinator/checkpoints.h):
//   "model":    {every key of [model], resolved},
//   "units":    [{"name": "blocks.0", "elements": 1234,
//                 "parameters": [{"name": "blocks.0.attention.qkv.weight", "shape": [96, 64]}, …]},
//                …],
//   "layout":   {"kind": "contiguous", "world_size": 2},     how shards cut units: layout.h
//   "progress": {"updates": 100, "tokens": 409600, "loss_mean": 2.3, "skips_in_row": 0}
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "worker/checkpoint/checkpoint.h"

namespace muster {

struct ShardFile {
  std::string name;  // inside the folder
  int64_t bytes = 0;
  uint64_t xxh3 = 0;
};

// What loading needs of a manifest.
struct SavedLayout {
  int world_size = 0;
  std::vector<ShardFile> files;  // by part of the layout
};

// Parses FOLDER/manifest.json. This and the functions below throw CheckpointError naming the file
// and the key.
nlohmann::json read_manifest(const std::string& folder);
ModelConfig model_of(const nlohmann::json& manifest, const std::string& folder);
SavedLayout layout_of(const nlohmann::json& manifest, const std::string& folder);
TrainingProgress progress_of(const nlohmann::json& manifest, const std::string& folder);

// Throws unless the checkpoint is of this model, unit by unit and shape by shape; the first
// difference is named.
void check_model(const nlohmann::json& manifest, const std::string& folder,
                 const ModelConfig& model, const std::vector<UnitSpec>& units);

}  // namespace muster
