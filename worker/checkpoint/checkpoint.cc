#include "worker/checkpoint/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "common/error.h"
#include "common/files.h"
#include "common/hash.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/safetensors.h"

namespace muster {
namespace {

std::string to_text(Range range) {
  return fmt::format("{}:{}", range.begin, range.end);
}

// A shard file of a checkpoint whose bytes are those that were saved.
class VerifiedShard {
 public:
  VerifiedShard(const std::string& folder, const ShardFile& file)
      : file_(verify(folder + "/" + file.name, file)) {}

  // Refuses a file whose part of the unit is not that of the layout.
  void check_range(const UnitSpec& unit, Range expected) const {
    const auto found = file_.metadata().find(unit.name);
    const std::string held = found == file_.metadata().end() ? "nothing" : found->second;
    if (held != to_text(expected)) {
      throw CheckpointError(file_.path() + ": holds " + held + " of " + unit.name + ", not " +
                            to_text(expected));
    }
  }
  void read(const std::string& name, int64_t first, TensorView out, const Stream& stream) const {
    file_.read(name, first, out, stream);
  }

 private:
  static std::string verify(const std::string& path, const ShardFile& file) {
    std::error_code error;
    const auto bytes = std::filesystem::file_size(path, error);
    if (error) throw CheckpointError(path + ": missing: " + error.message());
    if (bytes != static_cast<uintmax_t>(file.bytes)) {
      throw CheckpointError(fmt::format("{}: torn: {} bytes of {}", path, bytes, file.bytes));
    }
    uint64_t hash = 0;
    try {
      hash = xxh3_file(path);
    } catch (const IoError& e) {
      throw CheckpointError(e.what());
    }
    if (hash != file.xxh3) {
      throw CheckpointError(fmt::format("{}: damaged: its hash is {}, the manifest says {}", path,
                                        to_hex(hash), to_hex(file.xxh3)));
    }
    return path;
  }

  SafetensorsFile file_;
};

}  // namespace

SavedShard save_shard(const std::string& folder, int part, int world_size,
                      const std::vector<UnitSpec>& units, const std::vector<ShardState>& state,
                      const Stream& stream) {
  std::vector<NamedTensor> tensors;
  std::map<std::string, std::string> ranges;
  for (const ShardState& one : state) {
    const UnitSpec& unit = units[one.unit];
    MUSTER_CHECK(one.range == owned_range(unit.numel(), world_size, part), unit.name);
    if (one.range.size() == 0) continue;
    ranges[unit.name] = to_text(one.range);
    tensors.push_back({unit.name + "/weight", one.weight});
    tensors.push_back({unit.name + "/m", one.m});
    tensors.push_back({unit.name + "/v", one.v});
  }
  SavedShard saved;
  saved.file = fmt::format("shard-{:05}-of-{:05}.safetensors", part, world_size);
  make_dirs(folder);
  const WrittenFile written = write_safetensors(folder + "/" + saved.file, tensors, ranges, stream);
  fsync_dir(folder);
  saved.bytes = written.bytes;
  saved.xxh3 = written.xxh3;
  return saved;
}

TrainingProgress load_checkpoint(const std::string& folder, const ModelConfig& model,
                                 const std::vector<UnitSpec>& units,
                                 const std::vector<ShardState>& state, const Stream& stream) {
  const nlohmann::json manifest = read_manifest(folder);
  check_model(manifest, folder, model, units);
  const SavedLayout saved = layout_of(manifest, folder);
  const TrainingProgress progress = progress_of(manifest, folder);

  // Opened, and so verified, when first needed: a rank reads the few files that hold its part.
  std::vector<std::optional<VerifiedShard>> shards(saved.world_size);
  for (const ShardState& one : state) {
    const UnitSpec& unit = units[one.unit];
    for (int rank = 0; rank < saved.world_size; ++rank) {
      const Range held = owned_range(unit.numel(), saved.world_size, rank);
      const Range wanted{std::max(held.begin, one.range.begin), std::min(held.end, one.range.end)};
      if (wanted.size() <= 0) continue;
      if (!shards[rank]) shards[rank].emplace(folder, saved.files[rank]);
      shards[rank]->check_range(unit, held);
      const auto read = [&](const char* kind, TensorView view) {
        if (!view.defined()) return;
        const int64_t at = wanted.begin - one.range.begin;
        shards[rank]->read(unit.name + kind, wanted.begin - held.begin,
                           view.slice(at, at + wanted.size()), stream);
      };
      read("/weight", one.weight);
      read("/m", one.m);
      read("/v", one.v);
    }
  }
  return progress;
}

std::string checkpoint_config_toml(const std::string& folder) {
  const nlohmann::json manifest = read_manifest(folder);
  const auto found = manifest.find("config_toml");
  if (found == manifest.end() || !found->is_string()) {
    throw CheckpointError(folder + "/manifest.json: has no config_toml");
  }
  return found->get<std::string>();
}

ModelConfig checkpoint_model(const std::string& folder) {
  return model_of(read_manifest(folder), folder);
}

}  // namespace muster
