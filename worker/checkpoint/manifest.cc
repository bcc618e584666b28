#include "worker/checkpoint/manifest.h"

#include <unistd.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/error.h"
#include "common/files.h"

namespace muster {
namespace {

using Json = nlohmann::json;

constexpr int kFormat = 1;
constexpr const char* kLayoutKind = "contiguous";

std::string manifest_path(const std::string& folder) {
  return folder + "/manifest.json";
}

// Visits every field of [model], in one place for both directions.
template <typename Config, typename Visit>
void each_model_key(Config& model, Visit visit) {
  visit("family", model.family);
  visit("vocab_size", model.vocab_size);
  visit("width", model.width);
  visit("layers", model.layers);
  visit("heads", model.heads);
  visit("kv_heads", model.kv_heads);
  visit("head_dim", model.head_dim);
  visit("ffn", model.ffn);
  visit("norm_eps", model.norm_eps);
  visit("tie_embeddings", model.tie_embeddings);
  visit("qkv_bias", model.qkv_bias);
  visit("qk_norm", model.qk_norm);
  visit("causal", model.causal);
  visit("rope_theta", model.rope_theta);
  visit("rope_scaling", model.rope_scaling);
  visit("rope_factor", model.rope_factor);
  visit("rope_low_freq_factor", model.rope_low_freq_factor);
  visit("rope_high_freq_factor", model.rope_high_freq_factor);
  visit("rope_original_positions", model.rope_original_positions);
  visit("max_positions", model.max_positions);
  visit("init_std", model.init_std);
}

Json to_json(const ModelConfig& model) {
  Json json = Json::object();
  each_model_key(model, [&](const char* key, const auto& value) { json[key] = value; });
  return json;
}

std::vector<int64_t> sizes(const Shape& shape) {
  return {shape.dims.begin(), shape.dims.begin() + shape.rank};
}

Json to_json(const std::vector<UnitSpec>& units) {
  Json json = Json::array();
  for (const UnitSpec& unit : units) {
    Json parameters = Json::array();
    for (const ParameterSpec& parameter : unit.parameters) {
      parameters.push_back({{"name", parameter.name}, {"shape", sizes(parameter.shape)}});
    }
    json.push_back(
        {{"name", unit.name}, {"elements", unit.numel()}, {"parameters", std::move(parameters)}});
  }
  return json;
}

// Runs `read`; what it finds missing or of another type is an error of this manifest.
template <typename Read>
auto reading(const std::string& folder, Read read) {
  try {
    return read();
  } catch (const Json::exception& e) {
    throw CheckpointError(manifest_path(folder) + ": " + e.what());
  }
}

[[noreturn]] void refuse(const std::string& folder, const std::string& what, const Json& saved,
                         const Json& wanted) {
  throw CheckpointError(manifest_path(folder) + ": the checkpoint is of another model: " + what +
                        " is " + saved.dump() + " in the checkpoint and " + wanted.dump() +
                        " in this run");
}

}  // namespace

std::string manifest_json(const ModelConfig& model, const std::vector<UnitSpec>& units,
                          int world_size, const TrainingProgress& progress) {
  const Json json = {{"model", to_json(model)},
                     {"units", to_json(units)},
                     {"layout", {{"kind", kLayoutKind}, {"world_size", world_size}}},
                     {"progress",
                      {{"updates", progress.updates},
                       {"tokens", progress.tokens},
                       {"loss_mean", progress.loss_mean},
                       {"skips_in_row", progress.skips_in_row}}}};
  return json.dump();
}

Json read_manifest(const std::string& folder) {
  const std::string path = manifest_path(folder);
  if (access(path.c_str(), F_OK) != 0) {
    throw CheckpointError(path + ": missing; the checkpoint was never completed");
  }
  Json manifest;
  try {
    manifest = Json::parse(read_file(path));
  } catch (const IoError& e) {
    throw CheckpointError(e.what());
  } catch (const Json::exception& e) {
    throw CheckpointError(path + ": torn: " + e.what());
  }
  reading(folder, [&] {
    const int format = manifest.at("format").get<int>();
    if (format != kFormat) {
      throw CheckpointError(path + ": format " + std::to_string(format) + ", this build reads " +
                            std::to_string(kFormat));
    }
  });
  return manifest;
}

ModelConfig model_of(const Json& manifest, const std::string& folder) {
  return reading(folder, [&] {
    ModelConfig model;
    const Json& json = manifest.at("model");
    each_model_key(model, [&](const char* key, auto& value) { json.at(key).get_to(value); });
    return model;
  });
}

SavedLayout layout_of(const Json& manifest, const std::string& folder) {
  return reading(folder, [&] {
    SavedLayout saved;
    const Json& layout = manifest.at("layout");
    saved.world_size = layout.at("world_size").get<int>();
    for (const Json& file : manifest.at("files")) {
      const auto name = file.at("name").get<std::string>();
      if (name.empty() || name.find('/') != std::string::npos) {
        throw CheckpointError(manifest_path(folder) + ": \"" + name + "\" is no name of a shard");
      }
      const auto hash = file.at("xxh3").get<std::string>();
      saved.files.push_back(
          {name, file.at("bytes").get<int64_t>(), std::strtoull(hash.c_str(), nullptr, 16)});
    }
    const auto kind = layout.at("kind").get<std::string>();
    if (kind != kLayoutKind) {
      throw CheckpointError(manifest_path(folder) + ": its layout \"" + kind +
                            "\" is not known to this build");
    }
    if (saved.world_size < 1 || saved.files.size() != static_cast<size_t>(saved.world_size)) {
      throw CheckpointError(manifest_path(folder) + ": " + std::to_string(saved.files.size()) +
                            " shards for " + std::to_string(saved.world_size) + " ranks");
    }
    return saved;
  });
}

TrainingProgress progress_of(const Json& manifest, const std::string& folder) {
  return reading(folder, [&] {
    TrainingProgress progress;
    const Json& json = manifest.at("progress");
    json.at("updates").get_to(progress.updates);
    json.at("tokens").get_to(progress.tokens);
    json.at("loss_mean").get_to(progress.loss_mean);
    json.at("skips_in_row").get_to(progress.skips_in_row);
    return progress;
  });
}

void check_model(const Json& manifest, const std::string& folder, const ModelConfig& model,
                 const std::vector<UnitSpec>& units) {
  reading(folder, [&] {
    const Json saved_model = to_json(model_of(manifest, folder));
    const Json wanted_model = to_json(model);
    for (const auto& [key, wanted] : wanted_model.items()) {
      const Json& saved = saved_model.at(key);
      // How weights were drawn does not matter once they are there.
      if (key != "init_std" && saved != wanted) refuse(folder, "model." + key, saved, wanted);
    }
    const Json& saved_units = manifest.at("units");
    const Json wanted_units = to_json(units);
    if (saved_units.size() != wanted_units.size()) {
      refuse(folder, "the number of units", saved_units.size(), wanted_units.size());
    }
    for (size_t u = 0; u < wanted_units.size(); ++u) {
      const Json& saved = saved_units.at(u).at("parameters");
      const Json& wanted = wanted_units[u]["parameters"];
      for (size_t p = 0; p < std::min(saved.size(), wanted.size()); ++p) {
        if (saved[p].at("name") != wanted[p]["name"]) {
          refuse(folder, "parameter " + std::to_string(p) + " of " + units[u].name,
                 saved[p].at("name"), wanted[p]["name"]);
        }
        if (saved[p].at("shape") != wanted[p]["shape"]) {
          refuse(folder, "the shape of " + units[u].parameters[p].name, saved[p].at("shape"),
                 wanted[p]["shape"]);
        }
      }
      if (saved_units[u] != wanted_units[u]) {
        refuse(folder, "unit " + units[u].name, saved_units[u], wanted_units[u]);
      }
    }
  });
}

}  // namespace muster
