#include "worker/generate/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <vector>

#include "common/error.h"
#include "common/run_dir.h"
#include "data/text/tokenizer.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/model/local_parameters.h"

namespace muster {
namespace {

namespace fs = std::filesystem;

struct LoadedModel {
  std::unique_ptr<Model> model;
  std::unique_ptr<LocalParameters> parameters;
  std::unique_ptr<Tokenizer> tokenizer;
  int64_t context = 0;  // tokens that the model sees at most
};

LoadedModel load(const std::string& folder) {
  const ModelConfig model = checkpoint_model(folder);
  const Config config = parse_config(checkpoint_config_toml(folder), folder + "/manifest.json");
  LoadedModel loaded;
  loaded.context = config.train.sequence_length;
  loaded.tokenizer = make_tokenizer(config.data.tokenizer);
  loaded.model = std::make_unique<Model>(model, loaded.context, ComputeContext());
  const std::vector<UnitSpec>& units = loaded.model->units();
  loaded.parameters = std::make_unique<LocalParameters>(units);
  std::vector<ShardState> state;
  for (size_t i = 0; i < units.size(); ++i) {
    const auto unit = static_cast<int>(i);
    // Weights alone: moments are left out.
    state.push_back({unit, {0, units[i].numel()}, loaded.parameters->flat_weights(unit), {}, {}});
  }
  load_checkpoint(folder, model, units, state);
  return loaded;
}

// Checkpoint folders of a run, newest first.
std::vector<std::string> checkpoints_of(const std::string& run) {
  std::vector<std::string> found;
  std::error_code error;
  for (const fs::directory_entry& entry :
       fs::directory_iterator(RunDir{run}.checkpoints(), error)) {
    if (entry.path().filename().string().starts_with("step-")) found.push_back(entry.path());
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

LoadedModel load_newest(const std::string& path) {
  if (fs::exists(path + "/manifest.json")) return load(path);
  std::string rejected;
  for (const std::string& folder : checkpoints_of(path)) {
    try {
      return load(folder);
    } catch (const CheckpointError& error) {
      rejected += fmt::format("\n  {}", error.what());
    }
  }
  if (!rejected.empty()) throw CheckpointError(path + ": no whole checkpoint:" + rejected);
  throw CheckpointError(path +
                        ": is neither a checkpoint (no manifest.json) nor a run directory with "
                        "checkpoints/step-…");
}

std::vector<int32_t> encode(const Tokenizer& tokenizer, const std::string& text) {
  std::string stored;
  tokenizer.encode(text, stored);
  const size_t width = tokenizer.token_bytes();
  std::vector<int32_t> tokens;
  for (size_t at = 0; at + width <= stored.size(); at += width) {
    uint32_t token = 0;
    for (size_t byte = 0; byte < width; ++byte) {
      token |= static_cast<uint32_t>(static_cast<uint8_t>(stored[at + byte])) << (8 * byte);
    }
    tokens.push_back(static_cast<int32_t>(token));
  }
  return tokens;
}

void check(const std::string& prompt, const GenerateOptions& options) {
  if (prompt.empty()) throw UsageError("the prompt is empty: give the beginning of a text");
  if (options.tokens < 1)
    throw UsageError(fmt::format("{} tokens: ask for 1 or more", options.tokens));
  if (!(options.sampling.temperature >= 0)) {
    throw UsageError(
        fmt::format("temperature {}: must be 0 or more", options.sampling.temperature));
  }
  if (options.sampling.top_k < 0) {
    throw UsageError(fmt::format("top-k {}: must be 0 or more", options.sampling.top_k));
  }
}

}  // namespace

std::string generate(const std::string& path, const std::string& prompt,
                     const GenerateOptions& options,
                     const std::function<void(std::string_view)>& on_token) {
  check(prompt, options);
  const LoadedModel loaded = load_newest(path);
  const CounterRng rng(options.seed, RandomPurpose::kGenerate, 0);
  std::vector<int32_t> tokens = encode(*loaded.tokenizer, prompt);
  std::string text;
  for (int64_t i = 0; i < options.tokens; ++i) {
    const auto excess = static_cast<std::ptrdiff_t>(tokens.size()) - loaded.context;
    if (excess > 0) tokens.erase(tokens.begin(), tokens.begin() + excess);
    const std::vector<float> logits = loaded.model->next_token_logits(*loaded.parameters, tokens);
    const int32_t token = sample_token(logits, options.sampling, rng, i);
    if (token == loaded.tokenizer->end_of_document()) break;
    tokens.push_back(token);
    const std::string piece = loaded.tokenizer->decode(token);
    text += piece;
    if (on_token) on_token(piece);
  }
  return text;
}

}  // namespace muster
