#include "worker/generate/generate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/files.h"
#include "common/hash.h"
#include "common/run_dir.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/model/local_parameters.h"
#include "worker/model/testing.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kSequenceLength = 12;

// An untrained model, saved by two ranks as a training run would.
void write_checkpoint(const std::string& folder, uint64_t seed) {
  Config config;
  config.train.sequence_length = kSequenceLength;
  ModelConfig model_config = testing::tiny_model("llama");
  model_config.vocab_size = 257;
  const Model model(model_config, kSequenceLength, {});
  LocalParameters parameters(model.units());
  parameters.initialise(seed);
  constexpr int kWorldSize = 2;
  nlohmann::json manifest =
      nlohmann::json::parse(manifest_json(model_config, model.units(), kWorldSize, {}));
  manifest["format"] = 1;
  manifest["config_toml"] = to_toml(config);
  for (int rank = 0; rank < kWorldSize; ++rank) {
    std::vector<ShardState> state;
    std::vector<Tensor> moments;
    for (size_t i = 0; i < model.units().size(); ++i) {
      const auto unit = static_cast<int>(i);
      const Range range = owned_range(model.units()[i].numel(), kWorldSize, rank);
      moments.push_back(Tensor::zeros({range.size()}, DType::kFloat32));
      state.push_back({unit, range, parameters.flat_weights(unit).slice(range.begin, range.end),
                       moments.back(), moments.back()});
    }
    const SavedShard saved = save_shard(folder, rank, kWorldSize, model.units(), state);
    manifest["files"].push_back(
        {{"name", saved.file}, {"bytes", saved.bytes}, {"xxh3", to_hex(saved.xxh3)}});
  }
  write_file_atomic(folder + "/manifest.json", manifest.dump());
}

template <typename E>
std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "no error";
}

class Generate : public ::testing::Test {
 protected:
  TempDir dir_;
  const std::string prompt_ = "abcdefgh";
  const GenerateOptions options_{.tokens = 30, .sampling = {.temperature = 0.8}, .seed = 4};
};

TEST_F(Generate, IsAFunctionOfCheckpointPromptAndSeed) {
  write_checkpoint(dir_.path(), 1);
  std::string pieces;
  const std::string text =
      generate(dir_.path(), prompt_, options_, [&](std::string_view piece) { pieces += piece; });
  EXPECT_EQ(text.size(), 30U);
  EXPECT_EQ(pieces, text);
  EXPECT_EQ(generate(dir_.path(), prompt_, options_), text);
  GenerateOptions other_seed = options_;
  other_seed.seed = 5;
  EXPECT_NE(generate(dir_.path(), prompt_, other_seed), text);
  EXPECT_NE(generate(dir_.path(), "hgfedcba", options_), text);
}

TEST_F(Generate, SeesTheLastTokensOfALongPrompt) {
  write_checkpoint(dir_.path(), 1);
  const std::string window = "0123456789ab";
  ASSERT_EQ(window.size(), static_cast<size_t>(kSequenceLength));
  EXPECT_EQ(generate(dir_.path(), "what came before " + window, options_),
            generate(dir_.path(), window, options_));
}

TEST_F(Generate, TakesTheNewestWholeCheckpointOfARun) {
  const RunDir run{dir_.path()};
  write_checkpoint(run.checkpoint(8), 1);
  write_checkpoint(run.checkpoint(10), 2);
  write_checkpoint(run.partial_checkpoint(12), 3);
  EXPECT_EQ(generate(run.root, prompt_, options_), generate(run.checkpoint(10), prompt_, options_));

  std::filesystem::resize_file(run.checkpoint(10) + "/shard-00001-of-00002.safetensors", 100);
  EXPECT_EQ(generate(run.root, prompt_, options_), generate(run.checkpoint(8), prompt_, options_));
  EXPECT_THAT(error_of<CheckpointError>([&] { generate(run.checkpoint(10), prompt_, options_); }),
              HasSubstr("shard-00001-of-00002.safetensors"));

  std::filesystem::remove(run.checkpoint(8) + "/shard-00000-of-00002.safetensors");
  EXPECT_THAT(error_of<CheckpointError>([&] { generate(run.root, prompt_, options_); }),
              AllOf(HasSubstr("no whole checkpoint"), HasSubstr("step-00000010"),
                    HasSubstr("step-00000008")));
}

TEST_F(Generate, RefusesWhatIsNoCheckpoint) {
  EXPECT_THAT(error_of<CheckpointError>([&] { generate(dir_.path(), prompt_, options_); }),
              AllOf(HasSubstr(dir_.path()), HasSubstr("manifest.json")));
}

TEST_F(Generate, RefusesBadOptions) {
  write_checkpoint(dir_.path(), 1);
  const auto error = [&](const std::string& prompt, GenerateOptions options) {
    return error_of<UsageError>([&] { generate(dir_.path(), prompt, options); });
  };
  EXPECT_THAT(error("", options_), HasSubstr("prompt"));
  EXPECT_THAT(error("a", {.tokens = 0}), HasSubstr("tokens"));
  EXPECT_THAT(error("a", {.sampling = {.temperature = -1}}), HasSubstr("temperature"));
  EXPECT_THAT(error("a", {.sampling = {.top_k = -2}}), HasSubstr("top-k"));
}

}  // namespace
}  // namespace muster
