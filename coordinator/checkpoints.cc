#include "coordinator/checkpoints.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "common/error.h"
#include "common/files.h"
#include "common/hash.h"
#include "common/logging.h"

namespace muster {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kManifestName = "manifest.json";

// N of "step-N"; nullopt for every other name.
std::optional<int64_t> step_of(const std::string& name) {
  const std::string prefix = "step-";
  if (!name.starts_with(prefix) || name.size() < prefix.size() + 8) return std::nullopt;
  if (name.find_first_not_of("0123456789", prefix.size()) != std::string::npos ||
      name.size() > prefix.size() + 18) {
    return std::nullopt;
  }
  return std::stoll(name.substr(prefix.size()));
}

Json to_json(const Manifest& manifest) {
  Json files = Json::array();
  for (const CheckpointFile& file : manifest.files) {
    files.push_back({{"name", file.name}, {"bytes", file.bytes}, {"xxh3", to_hex(file.xxh3)}});
  }
  return {{"format", kCheckpointFormat},
          {"step", manifest.step},
          {"generation", manifest.generation},
          {"world_size", manifest.world_size},
          {"seed", manifest.seed},
          {"tokens", manifest.tokens},
          {"global_batch", manifest.global_batch},
          {"dataset",
           {{"fingerprint", manifest.dataset.fingerprint},
            {"train_samples", manifest.dataset.train_samples},
            {"held_out_samples", manifest.dataset.held_out_samples},
            {"vocab_size", manifest.dataset.vocab_size}}},
          {"config_toml", manifest.config_toml},
          {"files", files}};
}

Manifest from_json(const Json& json) {
  Manifest manifest;
  json.at("step").get_to(manifest.step);
  json.at("generation").get_to(manifest.generation);
  json.at("world_size").get_to(manifest.world_size);
  json.at("seed").get_to(manifest.seed);
  json.at("tokens").get_to(manifest.tokens);
  json.at("global_batch").get_to(manifest.global_batch);
  json.at("config_toml").get_to(manifest.config_toml);
  const Json& dataset = json.at("dataset");
  dataset.at("fingerprint").get_to(manifest.dataset.fingerprint);
  dataset.at("train_samples").get_to(manifest.dataset.train_samples);
  dataset.at("held_out_samples").get_to(manifest.dataset.held_out_samples);
  dataset.at("vocab_size").get_to(manifest.dataset.vocab_size);
  for (const Json& file : json.at("files")) {
    const std::string hash = file.at("xxh3").get<std::string>();
    manifest.files.push_back({file.at("name").get<std::string>(), file.at("bytes").get<int64_t>(),
                              std::strtoull(hash.c_str(), nullptr, 16)});
  }
  return manifest;
}

// Throws CheckpointError unless every file is a plain name in `folder` and has its size.
void check_files(const std::string& folder, const std::vector<CheckpointFile>& files) {
  for (const CheckpointFile& file : files) {
    if (file.name.empty() || file.name.find('/') != std::string::npos || file.name[0] == '.') {
      throw CheckpointError(fmt::format("{}: \"{}\" is no name of a shard", folder, file.name));
    }
    const std::string path = folder + "/" + file.name;
    std::error_code error;
    const auto bytes = fs::file_size(path, error);
    if (error) {
      throw CheckpointError(fmt::format("{}: the shard is missing ({})", path, error.message()));
    }
    if (bytes != static_cast<uintmax_t>(file.bytes)) {
      throw CheckpointError(
          fmt::format("{}: the shard is torn: {} bytes instead of {}", path, bytes, file.bytes));
    }
  }
}

void remove_tree(const std::string& path) noexcept {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) spdlog::warn("{}: cannot be removed: {}", path, error.message());
}

// Takes the final name off first: a removal that is cut short must not look like a torn checkpoint.
void retire(const RunDir& run, int64_t step) noexcept {
  std::error_code error;
  const std::string aside =
      run.checkpoints() + "/" + RunDir::kPartialPrefix + "old-" + RunDir::checkpoint_name(step);
  remove_tree(aside);
  fs::rename(run.checkpoint(step), aside, error);
  if (error) {
    spdlog::warn("{}: cannot be removed: {}", run.checkpoint(step), error.message());
  } else {
    remove_tree(aside);
  }
}

// "key = value" lines of one section of what to_toml printed.
std::map<std::string, std::string> section_lines(const std::string& toml,
                                                 const std::string& section) {
  std::map<std::string, std::string> values;
  std::istringstream lines(toml);
  bool inside = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("[")) inside = line == "[" + section + "]";
    const size_t equals = line.find(" = ");
    if (inside && equals != std::string::npos) {
      values[section + "." + line.substr(0, equals)] = line.substr(equals + 3);
    }
  }
  return values;
}

}  // namespace

std::vector<int64_t> list_checkpoints(const RunDir& run) {
  std::vector<int64_t> steps;
  std::error_code error;
  for (fs::directory_iterator it(run.checkpoints(), error), end; !error && it != end;
       it.increment(error)) {
    if (auto step = step_of(it->path().filename().string())) steps.push_back(*step);
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    throw IoError(fmt::format("{}: {}", run.checkpoints(), error.message()));
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

Manifest read_checkpoint(const RunDir& run, int64_t step) {
  const std::string folder = run.checkpoint(step);
  const std::string path = folder + "/" + kManifestName;
  Manifest manifest;
  try {
    const Json json = Json::parse(read_file(path));
    const int format = json.at("format").get<int>();
    // Not damaged: to fall back to an older one would overwrite it.
    if (format > kCheckpointFormat) {
      throw Error(fmt::format("{}: format {}, and this muster reads format {}", path, format,
                              kCheckpointFormat));
    }
    manifest = from_json(json);
  } catch (const IoError& e) {
    throw CheckpointError(fmt::format("the checkpoint has no manifest: {}", e.what()));
  } catch (const Json::exception& e) {
    throw CheckpointError(fmt::format("{}: the manifest is damaged: {}", path, e.what()));
  }
  if (manifest.step != step) {
    throw CheckpointError(fmt::format("{}: the manifest is of step {}", path, manifest.step));
  }
  check_files(folder, manifest.files);
  return manifest;
}

CheckpointChoice choose_checkpoint(const RunDir& run, const std::set<int64_t>& excluded) {
  CheckpointChoice choice;
  for (int64_t step : list_checkpoints(run)) {
    if (excluded.contains(step)) continue;
    try {
      choice.manifest = read_checkpoint(run, step);
      choice.found = true;
      break;
    } catch (const CheckpointError& e) {
      choice.rejected.emplace_back(e.what());
    }
  }
  return choice;
}

void commit_checkpoint(const RunDir& run, const Manifest& manifest,
                       const std::string& worker_json) {
  const std::string folder = run.partial_checkpoint(manifest.step);
  check_files(folder, manifest.files);
  Json json = to_json(manifest);
  const Json theirs = Json::parse(worker_json, nullptr, /*allow_exceptions=*/false);
  if (!theirs.is_object()) {
    throw CheckpointError(fmt::format("{}: rank 0 sent no valid layout of its model", folder));
  }
  for (const auto& [key, value] : theirs.items()) json.emplace(key, value);

  write_file_atomic(folder + "/" + kManifestName, json.dump(1) + "\n");
  std::error_code error;
  if (fs::exists(run.checkpoint(manifest.step), error)) retire(run, manifest.step);
  fs::rename(folder, run.checkpoint(manifest.step), error);
  if (error) {
    throw IoError(fmt::format("{}: cannot be renamed to {}: {}", folder,
                              RunDir::checkpoint_name(manifest.step), error.message()));
  }
  fsync_dir(run.checkpoints());
}

void discard_partial(const RunDir& run, int64_t step) noexcept {
  remove_tree(run.partial_checkpoint(step));
}

void remove_partials(const RunDir& run) noexcept {
  std::vector<std::string> stale;
  std::error_code error;
  for (fs::directory_iterator it(run.checkpoints(), error), end; !error && it != end;
       it.increment(error)) {
    if (it->path().filename().string().starts_with(RunDir::kPartialPrefix)) {
      stale.push_back(it->path());
    }
  }
  for (const std::string& path : stale) remove_tree(path);
}

void prune_checkpoints(const RunDir& run, int64_t keep) noexcept {
  if (keep <= 0) return;
  try {
    const std::vector<int64_t> steps = list_checkpoints(run);
    for (size_t i = static_cast<size_t>(keep); i < steps.size(); ++i) retire(run, steps[i]);
  } catch (const Error& e) {
    spdlog::warn("old checkpoints stay: {}", e.what());
  }
}

void check_same_model(const Manifest& manifest, const std::string& folder, const Config& config) {
  Config theirs = parse_config(manifest.config_toml, folder + "/manifest.json");
  Config ours = config;
  theirs.model = resolve_model(theirs, manifest.dataset.vocab_size);
  ours.model = resolve_model(ours, manifest.dataset.vocab_size);
  auto saved = section_lines(to_toml(theirs), "model");
  auto wanted = section_lines(to_toml(ours), "model");
  saved["data.tokenizer"] = theirs.data.tokenizer;
  wanted["data.tokenizer"] = ours.data.tokenizer;
  for (const auto& [key, value] : wanted) {
    if (saved[key] == value) continue;
    throw CheckpointError(fmt::format(
        "{} is a checkpoint of another model: its {} is {}, the config says {}: take the config of "
        "that run, or another run.dir",
        folder, key, saved[key], value));
  }
}

}  // namespace muster
