// Checkpoints of a toy model, as the workers and the coordinator write them together.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/files.h"
#include "common/hash.h"
#include "common/rng.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/sharding/testing.h"

namespace muster::testing {

// Whole units of one kind of state: "/weight", "/m" or "/v".
struct ToyState {
  explicit ToyState(uint64_t seed) {
    for (const UnitSpec& unit : toy_units()) {
      for (auto* kind : {&weight, &m, &v}) {
        kind->emplace_back(Shape{unit.numel()}, DType::kFloat32);
        const CounterRng rng(seed, RandomPurpose::kInit, kind->size() * 3 + (kind == &m ? 1 : 2));
        for (int64_t i = 0; i < unit.numel(); ++i) {
          kind->back().data<float>()[i] = static_cast<float>(rng.normal(i));
        }
      }
    }
  }
  // What one rank of a world owns, as views of the whole.
  std::vector<ShardState> part(int world_size, int rank) const {
    std::vector<ShardState> state;
    const std::vector<UnitSpec> units = toy_units();
    for (size_t i = 0; i < units.size(); ++i) {
      const Range range = owned_range(units[i].numel(), world_size, rank);
      const auto cut = [&](const std::vector<Tensor>& kind) {
        return kind[i].view().slice(range.begin, range.end);
      };
      state.push_back({static_cast<int>(i), range, cut(weight), cut(m), cut(v)});
    }
    return state;
  }

  std::vector<Tensor> weight, m, v;
};

inline ModelConfig toy_config() {
  ModelConfig model;
  model.width = 24;
  model.vocab_size = 5;
  return model;
}

// Saves `state` as a world of `world_size` ranks and writes the manifest beside it.
inline void write_toy_checkpoint(const std::string& folder, const ToyState& state, int world_size,
                                 const TrainingProgress& progress) {
  nlohmann::json manifest =
      nlohmann::json::parse(manifest_json(toy_config(), toy_units(), world_size, progress));
  manifest["format"] = 1;
  manifest["config_toml"] = "[run]\nname = \"toy\"\n";
  for (int rank = 0; rank < world_size; ++rank) {
    const SavedShard saved =
        save_shard(folder, rank, world_size, toy_units(), state.part(world_size, rank));
    manifest["files"].push_back(
        {{"name", saved.file}, {"bytes", saved.bytes}, {"xxh3", to_hex(saved.xxh3)}});
  }
  write_file_atomic(folder + "/manifest.json", manifest.dump());
}

}  // namespace muster::testing
