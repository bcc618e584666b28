// Save, kill, resume: the curve goes on as if nothing had happened, bit for bit.
#include <gtest/gtest.h>

#include <filesystem>

#include "common/run_dir.h"
#include "tests/e2e/sandbox.h"

namespace muster {
namespace {

using std::chrono::seconds;

// Large enough that the kill after step 30 comes before step 50.
const std::vector<std::string> kSlow = {"model.width=96", "model.ffn=256",
                                        "train.sequence_length=64", "checkpoint.every=10"};

std::vector<std::string> with(std::vector<std::string> settings, const std::string& more) {
  settings.push_back(more);
  return settings;
}

class Resume : public testing::Test {
 protected:
  // Trains `name` with two workers and kills every process once the checkpoint of step 30 is there.
  void train_and_kill(const std::string& name) {
    Child child = sandbox_.start(sandbox_.train_arguments(name, 2, kSlow));
    const std::string checkpoint = RunDir{sandbox_.path(name)}.checkpoint(30);
    ASSERT_TRUE(eventually(Deadline::after(seconds(60)),
                           [&] { return std::filesystem::exists(checkpoint); }));
    sandbox_.kill_everything();
    sandbox_.finish(child);
    ASSERT_FALSE(sandbox_.metrics(name).contains(50))
        << "the run ended before it was killed; make it slower";
  }

  Sandbox sandbox_;
};

TEST_F(Resume, ContinuesBitwiseAfterEverythingWasKilled) {
  sandbox_.train("whole", 2, kSlow);
  train_and_kill("killed");
  const auto outcome = sandbox_.train("killed", 2, kSlow);
  EXPECT_EQ(sandbox_.losses("whole"), sandbox_.losses("killed")) << outcome.output;
  const auto whole = sandbox_.samples("whole");
  const auto killed = sandbox_.samples("killed");
  EXPECT_EQ(whole, killed);
}

TEST_F(Resume, ATornShardIsNamedAndTheOneBeforeIsUsed) {
  sandbox_.train("whole", 2, kSlow);
  train_and_kill("killed");
  const std::string newest = RunDir{sandbox_.path("killed")}.checkpoint(30);
  std::string torn;
  for (const auto& entry : std::filesystem::directory_iterator(newest)) {
    if (entry.path().extension() == ".safetensors") torn = entry.path();
  }
  ASSERT_FALSE(torn.empty());
  std::filesystem::resize_file(torn, std::filesystem::file_size(torn) / 2);
  const auto outcome = sandbox_.train("killed", 2, kSlow);
  EXPECT_NE(outcome.output.find(std::filesystem::path(torn).filename()), std::string::npos)
      << outcome.output;
  EXPECT_EQ(sandbox_.losses("whole"), sandbox_.losses("killed"));
}

TEST_F(Resume, AFlippedByteIsNamedAndTheOneBeforeIsUsed) {
  sandbox_.train("whole", 2, kSlow);
  train_and_kill("killed");
  const std::string shard =
      RunDir{sandbox_.path("killed")}.checkpoint(30) + "/shard-00001-of-00002.safetensors";
  std::string bytes = read_file(shard);
  bytes[bytes.size() - 5] ^= 1;
  write_file_atomic(shard, bytes);
  const auto outcome = sandbox_.train("killed", 2, kSlow);
  EXPECT_NE(outcome.output.find("shard-00001-of-00002.safetensors"), std::string::npos)
      << outcome.output;
  EXPECT_EQ(sandbox_.losses("whole"), sandbox_.losses("killed"));
}

TEST_F(Resume, WorksAtAnotherWorldSize) {
  sandbox_.train("whole", 2, kSlow);
  train_and_kill("killed");
  sandbox_.train("killed", 3, kSlow);
  const auto whole = sandbox_.losses("whole");
  const auto resumed = sandbox_.losses("killed");
  ASSERT_EQ(resumed.size(), 50U);
  for (size_t i = 0; i < whole.size(); ++i)
    EXPECT_NEAR(whole[i], resumed[i], 1e-5 * whole[i]) << "step " << i + 1;
}

TEST_F(Resume, ACheckpointOfAnotherModelIsRefusedByTheKeyThatDiffers) {
  sandbox_.train("run", 1, {"train.steps=3"});
  const auto outcome =
      sandbox_.run(sandbox_.train_arguments("run", 1, with({"train.steps=6"}, "model.width=64")));
  EXPECT_FALSE(outcome.status.ok());
  EXPECT_NE(outcome.output.find("model.head_dim"), std::string::npos) << outcome.output;
  EXPECT_NE(outcome.output.find("checkpoint"), std::string::npos) << outcome.output;
}

TEST_F(Resume, AFinishedRunSaysSoAndGeneratesText) {
  sandbox_.train("run", 2, {"train.steps=5"});
  sandbox_.train("run", 2, {"train.steps=5"});
  EXPECT_EQ(sandbox_.losses("run").size(), 5U);
  const auto text =
      sandbox_.run({"generate", sandbox_.path("run"), "--prompt", "the ", "--tokens", "20"});
  EXPECT_TRUE(text.status.ok()) << text.output;
  EXPECT_EQ(text.output.rfind("the ", 0), 0U) << text.output;
  const auto again =
      sandbox_.run({"generate", sandbox_.path("run"), "--prompt", "the ", "--tokens", "20"});
  EXPECT_EQ(text.output, again.output) << "the same seed must give the same text";
}

TEST_F(Resume, WhereNothingIsLeftToDoNothingIsStarted) {
  sandbox_.train("run", 1, {"train.steps=5"});
  std::filesystem::remove_all(sandbox_.path("run/logs"));
  const auto again = sandbox_.train("run", 1, {"train.steps=5"});
  EXPECT_NE(again.output.find("nothing to do: the checkpoint of step 5"), std::string::npos)
      << again.output;
  EXPECT_FALSE(std::filesystem::exists(sandbox_.path("run/logs"))) << "a process was started";
  // No node ever comes: the coordinator must not wait for one.
  const auto coordinator =
      sandbox_.run({"coordinator", sandbox_.config(), "--set",
                    "run.dir=\"" + sandbox_.path("run") + "\"", "--set", "train.steps=5"});
  EXPECT_TRUE(coordinator.status.ok()) << coordinator.output;
  EXPECT_NE(coordinator.output.find("nothing to do"), std::string::npos) << coordinator.output;
}

}  // namespace
}  // namespace muster
