// A checkpoint is a folder step-%08d/: manifest.json (written by the coordinator, last, before one
// rename) and one safetensors file a rank. A shard file holds for every unit that the rank owns
// part of: UNIT/weight float32, UNIT/m and UNIT/v in the moments' type, [elements], and in its
// __metadata__ which elements of the flat unit those are ("UNIT": "BEGIN:END"). manifest.h has the
// worker's part of the manifest.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "worker/model/model.h"
#include "worker/sharding/sharded_parameters.h"

namespace muster {

struct SavedShard {
  std::string file;  // name inside the folder: shard-00000-of-00002.safetensors
  int64_t bytes = 0;
  uint64_t xxh3 = 0;
};
// Writes `part` of the layout, which is what `state` holds, into `folder` (made if missing), synced
// to disk, as it is when `stream`, on whose device the state lies, has come so far. Throws IoError
// with the path and what was short (disk full).
SavedShard save_shard(const std::string& folder, int part, int world_size,
                      const std::vector<UnitSpec>& units, const std::vector<ShardState>& state,
                      const Stream& stream = {});

// Where training stands, beside the sharded state; the same on every rank.
struct TrainingProgress {
  int64_t updates = 0;     // applied optimizer updates
  int64_t tokens = 0;      // target tokens seen
  double loss_mean = 0.0;  // running mean for the spike guard
  int64_t skips_in_row = 0;
};
// What rank 0 adds to the manifest, a JSON object.
std::string manifest_json(const ModelConfig& model, const std::vector<UnitSpec>& units,
                          int world_size, const TrainingProgress& progress);

// Reads from a checkpoint of any world size into `state`: its ranges say what is wanted, views that
// are not defined are left out (moments, to generate). Every file that is read is verified against
// the manifest's hash first. Throws CheckpointError naming the file: missing, torn, damaged, of
// another model (which key or shape differs); part of `state` may have been written by then.
TrainingProgress load_checkpoint(const std::string& folder, const ModelConfig& model,
                                 const std::vector<UnitSpec>& units,
                                 const std::vector<ShardState>& state, const Stream& stream = {});

// The resolved run config stored in the manifest, as TOML (for generate). Throws CheckpointError.
std::string checkpoint_config_toml(const std::string& folder);
// The vocabulary-resolved model section of the manifest.
ModelConfig checkpoint_model(const std::string& folder);

}  // namespace muster
