// Checkpoints on disk, as the coordinator sees them: which there are, which are whole, how one is
// committed.
//
// RUN_DIR/checkpoints/step-00000100/ holds the workers' shard files and manifest.json:
//   {"format": 1, "step": 100, "generation": 3, "world_size": 2, "seed": 1,
//    "tokens": 409600,                            target tokens trained on so far
//    "global_batch": 16,
//    "dataset": {"fingerprint": "…", "train_samples": …, "held_out_samples": …, "vocab_size": 256},
//    "config_toml": "…",                          the resolved config of the run
//    "files": [{"name": "shard-00000-of-00002.safetensors", "bytes": 123, "xxh3": "16 hex digits"},
//    …],  by part …}                                           and every key of rank 0's
//    ShardSaved.manifest_json (an object: model,
//                                                 units, progress), which must not repeat a key
//                                                 from above
// Workers write into .partial-step-00000100/ and sync their files. The coordinator then writes the
// manifest, syncs it and the folder, renames the folder and syncs its parent: what has the final
// name is whole, or was damaged later.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "common/config/config.h"
#include "common/run_dir.h"

namespace muster {

constexpr int kCheckpointFormat = 1;

struct CheckpointFile {
  std::string name;  // inside the folder
  int64_t bytes = 0;
  uint64_t xxh3 = 0;
};

struct DatasetFacts {
  std::string fingerprint;
  int64_t train_samples = 0;
  int64_t held_out_samples = 0;
  int64_t vocab_size = 0;
};

// The coordinator's part of manifest.json.
struct Manifest {
  int64_t step = 0;
  uint64_t generation = 0;
  int64_t world_size = 0;
  uint64_t seed = 0;
  int64_t tokens = 0;
  int64_t global_batch = 0;
  DatasetFacts dataset;
  std::string config_toml;
  std::vector<CheckpointFile> files;
};

// Steps that have a folder with a final name, newest first, whole or not.
std::vector<int64_t> list_checkpoints(const RunDir& run);

// Reads the manifest and checks that every file is there with its size (the workers check the
// hashes of what they read). Throws CheckpointError naming the folder, the file and what is wrong.
Manifest read_checkpoint(const RunDir& run, int64_t step);

// The newest whole checkpoint, and what was wrong with the newer ones.
struct CheckpointChoice {
  bool found = false;
  Manifest manifest;
  std::vector<std::string> rejected;  // newest first
};
CheckpointChoice choose_checkpoint(const RunDir& run, const std::set<int64_t>& excluded = {});

// Turns the partial folder of manifest.step into a checkpoint. `worker_json` is rank 0's part. A
// damaged folder of the same name is replaced. Throws CheckpointError (a shard is not as reported,
// or worker_json is no object) or IoError; the caller then discards the partial.
void commit_checkpoint(const RunDir& run, const Manifest& manifest, const std::string& worker_json);

// Removes the partial folder of one step, if there is one. Does not throw: what stays is removed at
// the next start.
void discard_partial(const RunDir& run, int64_t step) noexcept;
// Removes what commits and prunes that were cut short left behind.
void remove_partials(const RunDir& run) noexcept;
// Removes all but the `keep` newest checkpoints (0: none).
void prune_checkpoints(const RunDir& run, int64_t keep) noexcept;

// Throws CheckpointError naming the key and both values when the checkpoint's model or tokenizer is
// not the one that `config` describes.
void check_same_model(const Manifest& manifest, const std::string& folder, const Config& config);

}  // namespace muster
