#include "common/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "common/error.h"
#include "common/files.h"

namespace muster {
namespace {

using testing::ElementsAre;

// The message of the ConfigError that parsing throws, or "accepted".
std::string error_of(const std::string& toml, const std::vector<std::string>& overrides = {}) {
  try {
    parse_config(toml, "demo.toml", overrides);
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.exit_code(), 2);
    return error.what();
  }
  return "accepted";
}

TEST(ConfigTest, EmptyTextGivesTheDefaults) {
  const Config config = parse_config("", "demo.toml");
  EXPECT_EQ(config.model.width, ModelConfig().width);
  EXPECT_EQ(config.train.global_batch, TrainConfig().global_batch);
  EXPECT_EQ(to_toml(config), to_toml(Config{}));
}

TEST(ConfigTest, ReadsEveryType) {
  const Config config = parse_config(
      "[run]\nname = \"x\"\nseed = 7\ndeterministic = false\n"
      "[model]\nrope_theta = 500000\nnorm_eps = 1e-6\n"
      "[data]\nsources = [\"a\", \"b/*.txt\"]\n",
      "demo.toml");
  EXPECT_EQ(config.run.name, "x");
  EXPECT_EQ(config.run.seed, 7u);
  EXPECT_FALSE(config.run.deterministic);
  EXPECT_EQ(config.model.rope_theta, 500000.0);
  EXPECT_EQ(config.model.norm_eps, 1e-6);
  EXPECT_THAT(config.data.sources, ElementsAre("a", "b/*.txt"));
}

TEST(ConfigTest, NamesUnknownKeysWithFileLineAndNearest) {
  EXPECT_EQ(error_of("[model]\nwidth = 64\nhedas = 4\n"),
            "demo.toml:3: model.hedas: unknown key; did you mean model.heads?");
  EXPECT_EQ(error_of("[train]\nlr = 0.1\n"),
            "demo.toml:2: train.lr: unknown key; did you mean optimizer.lr?");
  EXPECT_EQ(error_of("[model]\nxyzzyplugh = 4\n"),
            "demo.toml:2: model.xyzzyplugh: unknown key; `muster train --help` lists all keys");
  EXPECT_EQ(error_of("heads = 4\n"), "demo.toml:1: heads: unknown key; did you mean model.heads?");
}

TEST(ConfigTest, NamesUnknownSections) {
  EXPECT_EQ(error_of("\n[modle]\n"),
            "demo.toml:2: [modle]: unknown section; did you mean [model]?");
  EXPECT_EQ(error_of("[fluxcapacitor]\n"),
            "demo.toml:1: [fluxcapacitor]: unknown section; `muster train --help` lists all "
            "keys");
  EXPECT_EQ(error_of("model = 3\n"),
            "demo.toml:1: model: is a section, write [model] on its own line");
}

TEST(ConfigTest, NamesWrongTypes) {
  EXPECT_EQ(error_of("[model]\nheads = \"4\"\n"),
            "demo.toml:2: model.heads: must be a whole number, not a string");
  EXPECT_EQ(error_of("[train]\nsteps = 1e3\n"),
            "demo.toml:2: train.steps: must be a whole number, not a number with a fraction");
  EXPECT_EQ(error_of("[run]\ndeterministic = 1\n"),
            "demo.toml:2: run.deterministic: must be true or false, not a whole number");
  EXPECT_EQ(error_of("[optimizer]\nlr = true\n"),
            "demo.toml:2: optimizer.lr: must be a number, not true or false");
  EXPECT_EQ(error_of("[run]\nname = 3\n"),
            "demo.toml:2: run.name: must be a string, not a whole number");
  EXPECT_EQ(error_of("[data]\nsources = [1]\n"),
            "demo.toml:2: data.sources: must be a list of strings, not a whole number in it");
  EXPECT_EQ(error_of("[data]\nsources = 1\n"),
            "demo.toml:2: data.sources: must be a list of strings, not a whole number");
}

TEST(ConfigTest, NamesValuesOutOfRange) {
  EXPECT_EQ(error_of("[train]\nglobal_batch = 0\n"),
            "demo.toml:2: train.global_batch: 0 is out of range: 1 to 1048576 samples");
  EXPECT_EQ(error_of("[run]\nseed = -1\n"), "demo.toml:2: run.seed: -1 is out of range: 0 or more");
  EXPECT_EQ(error_of("[optimizer]\nbeta1 = 1.0\n"),
            "demo.toml:2: optimizer.beta1: 1 is out of range: 0 to 0.999999");
  EXPECT_EQ(error_of("[optimizer]\nlr = nan\n"),
            "demo.toml:2: optimizer.lr: nan is out of range: 0 to 100");
}

TEST(ConfigTest, NamesTheRangeOfNumbersThatNoMachineHolds) {
  const std::string digits(30, '9');
  EXPECT_EQ(error_of("[train]\nsteps = " + digits + "  # many\n"),
            "demo.toml:2: train.steps: " + digits + " is out of range: 1 to 1e+12 steps");
  EXPECT_EQ(error_of("[model]\nwidth = 64\n[run]\nseed = +9_" + digits + "\n"),
            "demo.toml:4: run.seed: +9_" + digits + " is out of range: 0 to 9223372036854775807");
  EXPECT_EQ(error_of("", {"train.steps=" + digits}),
            "--set: train.steps: " + digits + " is out of range: 1 to 1e+12 steps");
  EXPECT_THAT(error_of("[train]\nstep = " + digits + "\n"), testing::HasSubstr("not valid TOML"));
}

TEST(ConfigTest, NamesBadChoices) {
  EXPECT_EQ(
      error_of("[parallel]\nshard = \"ful\"\n"),
      "demo.toml:2: parallel.shard: \"ful\" is not one of full | grad | optimizer | none; did "
      "you mean \"full\"?");
  EXPECT_EQ(error_of("[model]\nfamily = \"bert-large\"\n"),
            "demo.toml:2: model.family: \"bert-large\" is not one of llama | gpt2");
}

TEST(ConfigTest, ChecksMemoryCheckpoint) {
  for (const char* good : {"none", "block", "selective", "every:1", "every:12"}) {
    EXPECT_EQ(error_of("[memory]\ncheckpoint = \"" + std::string(good) + "\"\n"), "accepted");
  }
  for (const char* bad : {"every", "every:", "every:0", "every:-1", "every:2x", "every:N",
                          "every:99999999999999999999", "blocks:2"}) {
    EXPECT_THAT(error_of("[memory]\ncheckpoint = \"" + std::string(bad) + "\"\n"),
                testing::StartsWith("demo.toml:2: memory.checkpoint: \"" + std::string(bad) +
                                    "\" is not one of none | block | selective | every:N"));
  }
}

TEST(ConfigTest, NamesTomlMistakes) {
  EXPECT_THAT(error_of("[model]\nwidth = \n"),
              testing::StartsWith("demo.toml:2: not valid TOML: "));
  EXPECT_THAT(error_of("[model]\nwidth = 1\nwidth = 2\n"),
              testing::StartsWith("demo.toml:3: not valid TOML: "));
}

TEST(ConfigTest, OverridesWinAndNameThemselves) {
  const Config config = parse_config(
      "[model]\nwidth = 64\n", "demo.toml",
      {"model.width=128", "optimizer.lr=3e-4", "run.name=2024", "schedule.type=wsd",
       "data.sources=[\"/a\", \"/b\"]", "run.deterministic=false", "run.dir=/tmp/a=b"});
  EXPECT_EQ(config.model.width, 128);
  EXPECT_EQ(config.optimizer.lr, 3e-4);
  EXPECT_EQ(config.run.name, "2024");
  EXPECT_EQ(config.schedule.type, "wsd");
  EXPECT_THAT(config.data.sources, ElementsAre("/a", "/b"));
  EXPECT_FALSE(config.run.deterministic);
  EXPECT_EQ(config.run.dir, "/tmp/a=b");
  EXPECT_THAT(parse_config("", "x", {"data.sources=/corpus"}).data.sources, ElementsAre("/corpus"));

  EXPECT_EQ(error_of("", {"model.hedas=4"}),
            "--set: model.hedas: unknown key; did you mean model.heads?");
  EXPECT_EQ(error_of("", {"model.heads=0"}), "--set: model.heads: 0 is out of range: 1 to 16384");
  EXPECT_EQ(error_of("", {"model.heads=many"}),
            "--set: model.heads: must be a whole number, not a string");
  EXPECT_EQ(error_of("", {"heads=4"}), "--set: \"heads=4\" must have the form section.key=value");
  EXPECT_EQ(error_of("", {"model.heads"}),
            "--set: \"model.heads\" must have the form section.key=value");
  EXPECT_THAT(error_of("", {"data.sources=[\"a\""}),
              testing::StartsWith("--set: data.sources: [\"a\" is not a TOML value: "));
}

TEST(ConfigTest, ResolvesSourcesAgainstTheConfigsFolder) {
  const TempDir dir;
  std::filesystem::create_directory(dir.path() + "/configs");
  const std::string path = dir.path() + "/configs/demo.toml";
  write_file_atomic(path, "[data]\nsources = [\"../corpus\", \"/abs/*.txt\"]\n");
  EXPECT_THAT(load_config(path).data.sources, ElementsAre(dir.path() + "/corpus", "/abs/*.txt"));
  const std::string here = std::filesystem::current_path().string();
  EXPECT_THAT(load_config(path, {"data.sources=corpus"}).data.sources,
              ElementsAre(here + "/corpus"));
}

TEST(ConfigTest, NamesAFileThatCannotBeRead) {
  const TempDir dir;
  const std::string missing = dir.path() + "/none.toml";
  try {
    load_config(missing);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.what(), missing + ": cannot read: No such file or directory");
  }
  EXPECT_THROW(load_config(dir.path()), ConfigError);
  write_file_atomic(missing, "");
  EXPECT_EQ(to_toml(load_config(missing)), to_toml(Config{}));
}

}  // namespace
}  // namespace muster
