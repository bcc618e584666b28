#include "coordinator/checkpoints.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/files.h"

namespace muster {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class CheckpointsTest : public testing::Test {
 protected:
  CheckpointsTest() : dir_("muster-checkpoints"), run_{dir_.path()} {
    fs::create_directories(run_.checkpoints());
  }

  // What two workers leave in the partial folder, and the coordinator's part about it.
  Manifest prepare(int64_t step) {
    fs::create_directories(run_.partial_checkpoint(step));
    Manifest manifest;
    manifest.step = step;
    manifest.world_size = 2;
    manifest.seed = ~uint64_t{0};
    manifest.dataset = {"abc", 100, 10, 256};
    manifest.config_toml = to_toml(Config{});
    for (const char* name : {"shard-0", "shard-1"}) {
      std::ofstream(run_.partial_checkpoint(step) + "/" + name) << "some bytes";
      manifest.files.push_back({name, 10, 0xfedcba9876543210});
    }
    return manifest;
  }
  void commit(int64_t step) {
    commit_checkpoint(run_, prepare(step), R"({"model": {"width": 8}})");
  }

  template <typename Action>
  static std::string error_of(Action action) {
    try {
      action();
    } catch (const CheckpointError& e) {
      return e.what();
    }
    return "no error";
  }

  TempDir dir_;
  RunDir run_;
};

TEST_F(CheckpointsTest, WhatIsCommittedIsRead) {
  commit(100);
  EXPECT_FALSE(fs::exists(run_.partial_checkpoint(100)));
  const Manifest manifest = read_checkpoint(run_, 100);
  EXPECT_EQ(manifest.world_size, 2);
  EXPECT_EQ(manifest.seed, ~uint64_t{0});
  EXPECT_EQ(manifest.dataset.fingerprint, "abc");
  EXPECT_EQ(manifest.dataset.vocab_size, 256);
  ASSERT_EQ(manifest.files.size(), 2u);
  EXPECT_EQ(manifest.files[1].name, "shard-1");
  EXPECT_EQ(manifest.files[1].xxh3, 0xfedcba9876543210);
  const auto json = nlohmann::json::parse(read_file(run_.checkpoint(100) + "/manifest.json"));
  EXPECT_EQ(json.at("model").at("width"), 8) << "rank 0's part is merged in";
  EXPECT_EQ(json.at("files").at(0).at("xxh3"), "fedcba9876543210");
}

TEST_F(CheckpointsTest, TheNewestWholeOneIsChosenAndTheTornNamed) {
  for (int64_t step : {10, 20, 30, 40}) commit(step);
  fs::resize_file(run_.checkpoint(40) + "/shard-1", 9);
  fs::remove(run_.checkpoint(30) + "/shard-0");
  const CheckpointChoice choice = choose_checkpoint(run_);
  ASSERT_TRUE(choice.found);
  EXPECT_EQ(choice.manifest.step, 20);
  EXPECT_THAT(
      choice.rejected,
      ElementsAre(HasSubstr("step-00000040/shard-1: the shard is torn: 9 bytes instead of 10"),
                  HasSubstr("step-00000030/shard-0: the shard is missing")));
  EXPECT_EQ(choose_checkpoint(run_, {20}).manifest.step, 10);
}

TEST_F(CheckpointsTest, ADamagedManifestIsNamed) {
  commit(10);
  const std::string path = run_.checkpoint(10) + "/manifest.json";
  for (const char* text : {"", "{", "[]", "{\"format\": 1}", "{\"format\": \"x\"}"}) {
    std::ofstream(path) << text;
    EXPECT_THAT(error_of([&] { read_checkpoint(run_, 10); }), HasSubstr(path)) << text;
  }
  std::ofstream(path) << "{\"format\": 2}";
  // Of a newer muster, not damaged: an older checkpoint must not take its place.
  try {
    choose_checkpoint(run_);
    FAIL() << "a newer format was passed over";
  } catch (const CheckpointError& e) {
    FAIL() << e.what();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("format 2"));
  }
  fs::remove(path);
  EXPECT_THAT(error_of([&] { read_checkpoint(run_, 10); }), HasSubstr("has no manifest"));
  EXPECT_FALSE(choose_checkpoint(run_).found);
}

TEST_F(CheckpointsTest, NamesThatLeadOutOfTheFolderAreRefused) {
  Manifest manifest = prepare(10);
  manifest.files[0].name = "../shard-0";
  EXPECT_THAT(error_of([&] { commit_checkpoint(run_, manifest, "{}"); }), HasSubstr("no name"));
}

TEST_F(CheckpointsTest, AShardThatIsNotAsReportedIsNotCommitted) {
  Manifest manifest = prepare(10);
  manifest.files[1].bytes = 11;
  EXPECT_THAT(error_of([&] { commit_checkpoint(run_, manifest, "{}"); }), HasSubstr("torn"));
  manifest.files[1].bytes = 10;
  EXPECT_THAT(error_of([&] { commit_checkpoint(run_, manifest, "nonsense"); }),
              HasSubstr("rank 0"));
  EXPECT_THAT(list_checkpoints(run_), IsEmpty());
  discard_partial(run_, 10);
  EXPECT_TRUE(fs::is_empty(run_.checkpoints()));
}

TEST_F(CheckpointsTest, ADamagedOneOfTheSameStepIsReplaced) {
  commit(10);
  fs::resize_file(run_.checkpoint(10) + "/shard-0", 1);
  commit(10);
  EXPECT_EQ(read_checkpoint(run_, 10).step, 10);
  EXPECT_THAT(list_checkpoints(run_), ElementsAre(10));
}

TEST_F(CheckpointsTest, OldOnesAndPartialsAreRemoved) {
  for (int64_t step : {1, 2, 3, 100000000}) commit(step);
  prepare(7);
  std::ofstream(run_.checkpoints() + "/notes.txt") << "not ours";
  prune_checkpoints(run_, 0);
  EXPECT_EQ(list_checkpoints(run_).size(), 4u);
  prune_checkpoints(run_, 2);
  EXPECT_THAT(list_checkpoints(run_), ElementsAre(100000000, 3));
  remove_partials(run_);
  EXPECT_FALSE(fs::exists(run_.partial_checkpoint(7)));
  EXPECT_TRUE(fs::exists(run_.checkpoints() + "/notes.txt"));
}

TEST_F(CheckpointsTest, NoFolderMeansNoCheckpoints) {
  fs::remove_all(run_.checkpoints());
  EXPECT_FALSE(choose_checkpoint(run_).found);
  remove_partials(run_);
}

TEST_F(CheckpointsTest, AnotherModelIsNamedByTheKeyThatDiffers) {
  commit(10);
  const Manifest manifest = read_checkpoint(run_, 10);
  Config config;
  EXPECT_NO_THROW(check_same_model(manifest, "ckpt", config));
  config.train.steps = 77;
  config.optimizer.lr = 0.5;
  EXPECT_NO_THROW(check_same_model(manifest, "ckpt", config)) << "only the model must be the same";
  config.model.vocab_size = 256;
  EXPECT_NO_THROW(check_same_model(manifest, "ckpt", config)) << "said and found are the same";
  config.model.layers = 5;
  const std::string error = error_of([&] { check_same_model(manifest, "ckpt", config); });
  EXPECT_THAT(error, HasSubstr("another model"));
  EXPECT_THAT(error, HasSubstr("model.layers is 4, the config says 5"));
}

}  // namespace
}  // namespace muster
