#include "worker/checkpoint/manifest.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "worker/checkpoint/testing.h"

namespace muster {
namespace {

// Through to_toml, which knows every key: one that the manifest forgets shows.
TEST(Manifest, KeepsEveryModelKey) {
  ModelConfig model;
  model.family = "gpt2";
  model.vocab_size = 1;
  model.width = 2;
  model.layers = 3;
  model.heads = 4;
  model.kv_heads = 5;
  model.head_dim = 6;
  model.ffn = 7;
  model.norm_eps = 1.0 / 3.0;
  model.tie_embeddings = !model.tie_embeddings;
  model.qkv_bias = !model.qkv_bias;
  model.qk_norm = !model.qk_norm;
  model.causal = !model.causal;
  model.rope_theta = 8.1;
  model.rope_scaling = "llama3";
  model.rope_factor = 9.1;
  model.rope_low_freq_factor = 10.1;
  model.rope_high_freq_factor = 11.1;
  model.rope_original_positions = 12;
  model.max_positions = 13;
  model.init_std = 14.1;
  const auto manifest = nlohmann::json::parse(manifest_json(model, {}, 2, {}));
  Config before;
  before.model = model;
  Config after;
  after.model = model_of(manifest, "folder");
  EXPECT_EQ(to_toml(after), to_toml(before));
  EXPECT_NE(to_toml(after), to_toml(Config()));
}

TEST(Manifest, DescribesUnitsForOtherReaders) {
  const auto manifest = nlohmann::json::parse(
      manifest_json(testing::toy_config(), testing::toy_units(), 3, {.tokens = 1'000'000'000'000}));
  EXPECT_EQ(manifest["units"][2]["name"], "blocks.1");
  EXPECT_EQ(manifest["units"][2]["elements"], 30);
  EXPECT_EQ(manifest["units"][2]["parameters"][1]["name"], "blocks.1.weight");
  EXPECT_EQ(manifest["units"][2]["parameters"][1]["shape"], nlohmann::json({4, 6}));
  EXPECT_EQ(manifest["layout"]["world_size"], 3);
  EXPECT_EQ(progress_of(manifest, "folder").tokens, 1'000'000'000'000);
}

}  // namespace
}  // namespace muster
