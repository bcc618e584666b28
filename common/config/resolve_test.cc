#include "common/config/resolve.h"

#include <gtest/gtest.h>

#include "common/error.h"

namespace muster {
namespace {

std::string error_of(const std::string& toml) {
  try {
    parse_config(toml, "demo.toml");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(ResolveTest, RefusesImpossibleShapes) {
  EXPECT_EQ(error_of("[model]\nheads = 6\nwidth = 96\nkv_heads = 4\n"),
            "demo.toml:4: model.kv_heads: 4 does not divide model.heads = 6");
  EXPECT_EQ(error_of("[model]\nheads = 6\n"),
            "demo.toml:2: model.heads: 6 does not divide model.width = 256, change one or set "
            "model.head_dim");
  // The default of heads meets a bad width: the message names the file, there is no line to name.
  EXPECT_EQ(error_of("[model]\nwidth = 6\n"),
            "demo.toml: model.heads: 4 does not divide model.width = 6, change one or set "
            "model.head_dim");
  EXPECT_EQ(error_of("[model]\nhead_dim = 5\n"),
            "demo.toml:2: model.head_dim: 5 is odd: rotary positions turn pairs, make it even");
  EXPECT_EQ(error_of("[model]\nfamily = \"gpt2\"\nhead_dim = 5\n"), "accepted");
}

TEST(ResolveTest, RefusesPositionsThatTheFamilyHasNot) {
  EXPECT_EQ(error_of("[model]\nmax_positions = 64\n"),
            "demo.toml:2: model.max_positions: only gpt2 has learned positions, remove the key");
  EXPECT_EQ(error_of("[model]\nfamily = \"gpt2\"\nmax_positions = 64\n"),
            "demo.toml:3: model.max_positions: 64 is less than train.sequence_length = 256");
  EXPECT_EQ(error_of("[model]\nfamily = \"gpt2\"\nrope_scaling = \"linear\"\n"),
            "demo.toml:3: model.rope_scaling: gpt2 has no rotary positions, use \"none\"");
  EXPECT_EQ(error_of("[model]\nrope_scaling = \"llama3\"\nrope_high_freq_factor = 1\n"),
            "demo.toml:3: model.rope_high_freq_factor: 1 must exceed rope_low_freq_factor = 1");
}

TEST(ResolveTest, RefusesWorkersThatCannotWorkTogether) {
  EXPECT_EQ(error_of("[parallel]\nworkers = 2\nbackend = \"single\"\n"),
            "demo.toml:3: parallel.backend: \"single\" cannot connect parallel.workers = 2, use "
            "\"auto\" or \"gloo\"");
  EXPECT_EQ(error_of("[parallel]\nworkers = 33\n"),
            "demo.toml:2: parallel.workers: 33 workers cannot share train.global_batch = 32 "
            "samples, use at most as many workers");
  EXPECT_EQ(error_of("[parallel]\nworkers = 32\n"), "accepted");
  EXPECT_EQ(error_of("[elastic]\nmin_workers = 33\n"),
            "demo.toml:2: elastic.min_workers: 33 workers cannot share train.global_batch = 32 "
            "samples: no run would ever begin");
  EXPECT_EQ(error_of("[elastic]\nmin_workers = 3\nmax_workers = 2\n"),
            "demo.toml:3: elastic.max_workers: 2 is fewer than elastic.min_workers = 3");
  EXPECT_EQ(error_of("[elastic]\nmin_workers = 32\nmax_workers = 32\n"), "accepted");
}

TEST(ResolveTest, ShardGroupsDivideTheWorkers) {
  EXPECT_EQ(error_of("[parallel]\nworkers = 6\nshard_group = 4\n"),
            "demo.toml:3: parallel.shard_group: 4 does not divide the number of workers, 6: use a "
            "divisor, such as the GPUs of a node, or 0 for one group of all");
  EXPECT_EQ(error_of("[parallel]\nworkers = 6\nshard_group = 3\n"), "accepted");
  EXPECT_EQ(error_of("[parallel]\nworkers = 6\nshard_group = 4\nshard = \"none\"\n"), "accepted");
  EXPECT_EQ(error_of("[parallel]\nshard_group = 4\n"), "accepted") << "who knows how many come";
  ParallelConfig parallel;
  EXPECT_EQ(shard_group_size(parallel, 6), 6);
  parallel.shard_group = 2;
  EXPECT_EQ(shard_group_size(parallel, 6), 2);
  EXPECT_THROW(shard_group_size(parallel, 5), ConfigError);
  parallel.shard = "none";
  EXPECT_EQ(shard_group_size(parallel, 5), 1);
}

TEST(ResolveTest, RefusesARunThatDoesNotAddUp) {
  EXPECT_EQ(error_of("[run]\nname = \"a/b\"\n"),
            "demo.toml:2: run.name: \"a/b\" must name a folder: not empty, no '/', no leading '.'");
  EXPECT_EQ(error_of("[train]\neval_every = 5\n[data]\nheld_out = 0\n"),
            "demo.toml:2: train.eval_every: nothing is held out to evaluate on, set data.held_out "
            "> 0");
  EXPECT_EQ(error_of("[schedule]\ntype = \"wsd\"\ndecay_steps = 950\n"),
            "demo.toml:3: schedule.decay_steps: warm-up (100 steps) and decay (950 steps) do not "
            "fit into train.steps = 1000");
  EXPECT_EQ(error_of("[data]\nsources = [\"\"]\n"),
            "demo.toml:2: data.sources: holds an empty path");
}

TEST(ResolveTest, FillsInALlama) {
  Config config;
  config.model.width = 100;
  config.model.heads = 10;
  const ModelConfig model = resolve_model(config, 257);
  EXPECT_EQ(model.vocab_size, 257);
  EXPECT_EQ(model.kv_heads, 10);
  EXPECT_EQ(model.head_dim, 10);
  EXPECT_EQ(model.ffn, 288);  // 266.67 rounded up to a multiple of 32
  EXPECT_EQ(model.max_positions, 0);
}

TEST(ResolveTest, FillsInAGpt2AndKeepsWhatIsSet) {
  Config config;
  config.model.family = "gpt2";
  config.model.kv_heads = 2;
  config.model.head_dim = 24;
  config.model.vocab_size = 300;
  config.train.sequence_length = 48;
  const ModelConfig model = resolve_model(config, 257);
  EXPECT_EQ(model.vocab_size, 300);
  EXPECT_EQ(model.kv_heads, 2);
  EXPECT_EQ(model.head_dim, 24);
  EXPECT_EQ(model.ffn, 1024);
  EXPECT_EQ(model.max_positions, 48);
}

TEST(ResolveTest, RefusesAVocabularySmallerThanTheTokenizers) {
  Config config;
  config.model.vocab_size = 128;
  try {
    resolve_model(config, 257);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "model.vocab_size: 128 is less than the tokenizer's 257 tokens");
  }
}

}  // namespace
}  // namespace muster
