#include "coordinator/left_behind.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "common/config/config.h"
#include "common/files.h"
#include "common/hash.h"
#include "common/protocol/muster.pb.h"
#include "coordinator/checkpoints.h"
#include "coordinator/json_lines.h"
#include "coordinator/run_log.h"

namespace muster {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr int64_t kTokens = 100;  // of a step
constexpr uint64_t kGeneration = 3;
constexpr int kWorld = 2;

std::string shard_name(int part) {
  return fmt::format("shard-{:05}-of-{:05}.safetensors", part, kWorld);
}

// A run directory as a coordinator leaves it that was killed after step 4, and workers that have
// trained to step 6 since.
class LeftBehindTest : public testing::Test {
 protected:
  LeftBehindTest() : dir_("muster-left"), run_{dir_.path()} {
    fs::create_directories(run_.checkpoints());
    write_file_atomic(run_.config(), to_toml(Config{}));
    RunLog log(run_, /*debug_samples=*/true);
    log.set_run(
        "session",
        R"({"datasets": [{"fingerprint": "abc", "trainSamples": "100", "vocabSize": 256}]})");
    log.begin_generation(kGeneration, 0, "start", {});
    for (int64_t step = 1; step <= 4; ++step) {
      log.step({.step = step, .tokens = kTokens, .generation = kGeneration}, {});
    }
  }

  static proto::Farewell farewell(int part, int64_t step) {
    proto::Farewell farewell;
    farewell.set_world_size(kWorld);
    proto::ShardSaved& saved = *farewell.mutable_saved();
    saved.set_generation(kGeneration);
    saved.set_rank(part);
    saved.set_part(part);
    saved.set_step(step);
    saved.set_file(shard_name(part));
    saved.set_bytes(10);
    saved.set_xxh3(xxh3("some bytes", 10));
    saved.set_manifest_json(R"({"model": {"width": 8}})");
    for (int64_t reported = 3; reported <= 6; ++reported) {
      proto::StepReport& report = *farewell.add_steps();
      report.set_generation(kGeneration);
      report.set_rank(part);
      report.set_step(reported);
      report.set_tokens(kTokens);
      report.set_loss(2.5);
      report.add_samples(reported * kWorld + part);
      report.add_sample_hashes(7);
    }
    return farewell;
  }
  void write(const std::string& folder, const proto::Farewell& farewell) {
    fs::create_directories(folder);
    const int part = farewell.saved().part();
    write_file_atomic(folder + "/" + shard_name(part), "some bytes");
    write_file_atomic(fmt::format("{}/{}.farewell", folder, part), farewell.SerializeAsString());
  }
  // What both workers leave at `step`.
  std::string leave(int64_t step) {
    std::string folder = run_.left_behind(step, kGeneration);
    for (int part = 0; part < kWorld; ++part) write(folder, farewell(part, step));
    return folder;
  }
  std::vector<int64_t> logged() const {
    std::vector<int64_t> steps;
    for (const auto& line : read_json_lines(run_.metrics())) steps.push_back(line.at("step"));
    return steps;
  }

  TempDir dir_;
  RunDir run_;
};

TEST_F(LeftBehindTest, BecomesACheckpointAndItsStepsAreWrittenDown) {
  leave(6);
  adopt_left_behind(run_);
  const Manifest manifest = read_checkpoint(run_, 6);
  EXPECT_EQ(manifest.generation, kGeneration);
  EXPECT_EQ(manifest.world_size, kWorld);
  EXPECT_EQ(manifest.tokens, 6 * kTokens);
  EXPECT_EQ(manifest.dataset.fingerprint, "abc");
  ASSERT_EQ(manifest.files.size(), 2U);
  EXPECT_EQ(manifest.files[1].name, shard_name(1));
  EXPECT_THAT(logged(), ElementsAre(1, 2, 3, 4, 5, 6));
  const auto lines = read_json_lines(run_.metrics());
  EXPECT_EQ(lines.back().at("total_tokens"), 6 * kTokens);
  EXPECT_EQ(read_json_lines(run_.samples()).back().at("samples"), nlohmann::json({12, 13}));
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(run_.checkpoint(6))) {
    names.push_back(entry.path().filename());
  }
  EXPECT_THAT(names, testing::UnorderedElementsAre(shard_name(0), shard_name(1), "manifest.json"));
}

TEST_F(LeftBehindTest, TheNewestWholeOneIsTaken) {
  leave(5);
  leave(6);
  fs::remove(run_.left_behind(6, kGeneration) + "/1.farewell");
  adopt_left_behind(run_);
  EXPECT_THAT(list_checkpoints(run_), ElementsAre(5));
}

TEST_F(LeftBehindTest, OneOlderThanTheLogCountsItsOwnTokens) {
  leave(3);
  adopt_left_behind(run_);
  EXPECT_EQ(read_checkpoint(run_, 3).tokens, 3 * kTokens);
}

// The coordinator that was about to make a checkpoint of it was killed too.
TEST_F(LeftBehindTest, OneThatWasBeingTakenIsTaken) {
  fs::rename(leave(6), run_.partial_checkpoint(6));
  adopt_left_behind(run_);
  EXPECT_EQ(read_checkpoint(run_, 6).tokens, 6 * kTokens);
}

TEST_F(LeftBehindTest, StepsThatNobodyReportsAreNotSkipped) {
  const std::string folder = leave(6);
  proto::Farewell silent = farewell(1, 6);
  silent.mutable_steps()->DeleteSubrange(0, 3);
  write(folder, silent);
  adopt_left_behind(run_);
  EXPECT_THAT(list_checkpoints(run_), IsEmpty());
  EXPECT_THAT(logged(), ElementsAre(1, 2, 3, 4));
}

// Whatever is wrong with a newer one, the older is taken.
class Damaged : public LeftBehindTest {
 protected:
  Damaged() : folder_(leave(6)), first_(folder_ + "/0.farewell") { leave(5); }
  void expect_the_older_one() {
    adopt_left_behind(run_);
    EXPECT_THAT(list_checkpoints(run_), ElementsAre(5));
    const CheckpointChoice choice = choose_checkpoint(run_);
    EXPECT_TRUE(choice.found);
    EXPECT_THAT(choice.rejected, IsEmpty());
    EXPECT_EQ(choice.manifest.tokens, 5 * kTokens);
  }

  std::string folder_;
  std::string first_;
};

TEST_F(Damaged, AFileInPlaceOfTheFolder) {
  fs::remove_all(folder_);
  std::ofstream(folder_) << "no folder";
  expect_the_older_one();
}

TEST_F(Damaged, AFolderInPlaceOfAFarewell) {
  fs::remove(first_);
  fs::create_directory(first_);
  expect_the_older_one();
}

TEST_F(Damaged, AFarewellThatLeadsNowhere) {
  fs::remove(first_);
  fs::create_symlink(folder_ + "/none", first_);
  expect_the_older_one();
}

TEST_F(Damaged, NoiseInAFarewell) {
  write_file_atomic(first_, "\xff\xfe noise");
  expect_the_older_one();
}

TEST_F(Damaged, AnEmptyFarewell) {
  write_file_atomic(first_, "");
  expect_the_older_one();
}

TEST_F(Damaged, AFolderWithoutFarewells) {
  for (int part = 0; part < kWorld; ++part) {
    fs::remove(fmt::format("{}/{}.farewell", folder_, part));
  }
  expect_the_older_one();
}

TEST_F(Damaged, AFarewellCutShortAnywhere) {
  const std::string whole = read_file(first_);
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    write_file_atomic(first_, whole.substr(0, bytes));
    adopt_left_behind(run_);
    ASSERT_THAT(list_checkpoints(run_), ElementsAre(5)) << bytes << " bytes";
  }
}

TEST_F(Damaged, AShardThatIsMissing) {
  fs::remove(folder_ + "/" + shard_name(1));
  expect_the_older_one();
}

TEST_F(Damaged, AShardThatIsTorn) {
  fs::resize_file(folder_ + "/" + shard_name(1), 9);
  expect_the_older_one();
}

TEST_F(Damaged, PartsOfAnotherWorld) {
  proto::Farewell other = farewell(0, 6);
  other.set_world_size(1);
  write(folder_, other);
  expect_the_older_one();
}

// The step of the content is another one than that of the folder: nothing is counted up to it.
TEST_F(Damaged, AStepOutOfThisWorld) {
  for (const int64_t step : {int64_t{1} << 60, int64_t{-1} << 60, int64_t{0}}) {
    for (int part = 0; part < kWorld; ++part) write(folder_, farewell(part, step));
    expect_the_older_one();
  }
}

TEST_F(Damaged, AnotherGeneration) {
  for (int part = 0; part < kWorld; ++part) {
    proto::Farewell other = farewell(part, 6);
    other.mutable_saved()->set_generation(kGeneration + 1);
    write(folder_, other);
  }
  expect_the_older_one();
}

TEST_F(Damaged, NoLayout) {
  for (const char* json : {"", "no json", "[]", "{\"model\": "}) {
    proto::Farewell other = farewell(0, 6);
    other.mutable_saved()->set_manifest_json(json);
    write(folder_, other);
    expect_the_older_one();
  }
}

TEST_F(LeftBehindTest, WithoutWhatTheRunWroteNothingHappens) {
  leave(6);
  fs::remove(run_.config());
  adopt_left_behind(run_);
  EXPECT_THAT(list_checkpoints(run_), IsEmpty());
  for (const char* suffix : {"", "-wal", "-shm"}) fs::remove(run_.journal() + suffix);
  adopt_left_behind(run_);
  write_file_atomic(run_.journal(), "no journal, and long enough to be taken for none");
  adopt_left_behind(run_);
  EXPECT_THAT(list_checkpoints(run_), IsEmpty());
}

TEST_F(LeftBehindTest, WithoutARunDirectoryNothingHappens) {
  adopt_left_behind(RunDir{dir_.path() + "/none"});
  EXPECT_FALSE(fs::exists(dir_.path() + "/none"));
}

}  // namespace
}  // namespace muster
