// Killing and stopping: what is left behind (nothing), what is said, and that the next start works
// at once.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <set>

#include "common/run_dir.h"
#include "tests/e2e/sandbox.h"

namespace muster {
namespace {

using std::chrono::seconds;
namespace fs = std::filesystem;

// Runs for much longer than any test waits, at a fixed size.
const std::vector<std::string> kEndless = {"train.steps=1000000", "checkpoint.every=20",
                                           "elastic.min_workers=2", "elastic.wait_timeout_s=0",
                                           "elastic.restarts=0"};

std::set<std::string> files_of(const std::string& folder) {
  std::set<std::string> names;
  if (!fs::exists(folder)) return names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    // Other tests that run meanwhile may have their folders there.
    if (!entry.is_directory()) names.insert(entry.path().filename());
  }
  return names;
}

class Faults : public testing::Test {
 protected:
  void SetUp() override { shared_memory_ = files_of("/dev/shm"); }

  // Starts an endless run of two workers and waits until it has committed some steps and a
  // checkpoint.
  Child start_training() {
    Child child = sandbox_.start(sandbox_.train_arguments("run", 2, kEndless));
    EXPECT_TRUE(eventually(Deadline::after(seconds(30)), [&] {
      return fs::exists(RunDir{sandbox_.path("run")}.checkpoint(20));
    })) << "it did not begin to train";
    return child;
  }

  void expect_nothing_left() {
    EXPECT_TRUE(eventually(Deadline::after(seconds(10)), [&] {
      return sandbox_.processes().empty();
    })) << testing::PrintToString(sandbox_.processes());
    EXPECT_EQ(files_of("/dev/shm"), shared_memory_);
    for (const auto& entry : fs::recursive_directory_iterator(sandbox_.path("run"))) {
      EXPECT_FALSE(entry.is_socket()) << entry.path();
    }
  }

  // The same run goes on from its checkpoint for a few steps more, at once.
  void expect_next_start_works() {
    const int64_t reached = sandbox_.metrics("run").rbegin()->first;
    const auto outcome = sandbox_.train("run", 2, {"train.steps=" + std::to_string(reached + 5)});
    EXPECT_EQ(sandbox_.metrics("run").rbegin()->first, reached + 5) << outcome.output;
  }

  Sandbox sandbox_;
  std::set<std::string> shared_memory_;
};

class KillOne : public Faults, public testing::WithParamInterface<const char*> {};

TEST_P(KillOne, LeavesNothingBehindAndTheNextStartWorks) {
  const std::string victim = GetParam();
  Child child = start_training();
  const auto pids = sandbox_.processes(victim);
  ASSERT_FALSE(pids.empty()) << testing::PrintToString(sandbox_.processes());
  ::kill(pids.front(), SIGKILL);
  const Outcome outcome = sandbox_.finish(child, 10);
  EXPECT_FALSE(outcome.status.ok());
  if (victim != "train") {
    EXPECT_NE(outcome.output.find(victim), std::string::npos) << outcome.output;
    EXPECT_NE(outcome.output.find("resume"), std::string::npos) << outcome.output;
  }
  if (victim == "worker" || victim == "data" || victim == "node") {
    EXPECT_NE(outcome.output.find(std::to_string(pids.front())), std::string::npos)
        << outcome.output;
    EXPECT_NE(outcome.output.find("SIGKILL"), std::string::npos) << outcome.output;
  }
  expect_nothing_left();
  expect_next_start_works();
}

INSTANTIATE_TEST_SUITE_P(Processes, KillOne,
                         testing::Values("worker", "data", "node", "coordinator", "train"),
                         [](const auto& param) { return std::string(param.param); });

class StopOne : public Faults, public testing::WithParamInterface<const char*> {};

TEST_P(StopOne, ASilentProcessEndsTheRunAfterFiveHeartbeats) {
  const std::string victim = GetParam();
  Child child = start_training();
  const auto pids = sandbox_.processes(victim);
  ASSERT_FALSE(pids.empty()) << testing::PrintToString(sandbox_.processes());
  ::kill(pids.front(), SIGSTOP);
  // Five heartbeats, one until it is looked at, and the ends of the others; without this, another
  // elastic.shutdown_timeout_s = 10 s for a process that cannot end.
  const Outcome outcome = sandbox_.finish(child, 12);
  EXPECT_FALSE(outcome.status.ok());
  EXPECT_NE(outcome.output.find("(pid " + std::to_string(pids.front())), std::string::npos)
      << outcome.output;
  expect_nothing_left();
}

INSTANTIATE_TEST_SUITE_P(Processes, StopOne, testing::Values("worker", "data", "node"),
                         [](const auto& param) { return std::string(param.param); });

class SignalTrain : public Faults, public testing::WithParamInterface<int> {};

TEST_P(SignalTrain, FinishesTheStepSavesAndLeaves) {
  Child child = start_training();
  child.signal(GetParam());
  const Outcome outcome = sandbox_.finish(child, 20);
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.to_string() << outcome.output;
  EXPECT_NE(outcome.output.find("resume"), std::string::npos) << outcome.output;
  expect_nothing_left();
  const int64_t reached = sandbox_.metrics("run").rbegin()->first;
  EXPECT_TRUE(fs::exists(RunDir{sandbox_.path("run")}.checkpoint(reached)))
      << "the last step was not saved";
  expect_next_start_works();
}

INSTANTIATE_TEST_SUITE_P(Signals, SignalTrain, testing::Values(SIGINT, SIGTERM),
                         [](const auto& param) {
                           return param.param == SIGINT ? "SIGINT" : "SIGTERM";
                         });

TEST_F(Faults, ASecondInterruptLeavesAtOnce) {
  Child child = start_training();
  // With a stopped worker the step cannot be finished, so that only the second Ctrl-C can end the
  // run.
  ::kill(sandbox_.processes("worker").front(), SIGSTOP);
  child.signal(SIGINT);
  EXPECT_FALSE(child.wait(Deadline::after(std::chrono::milliseconds(500))));
  child.signal(SIGINT);
  const Outcome outcome = sandbox_.finish(child, 10);
  EXPECT_FALSE(outcome.status.ok());
  expect_nothing_left();
  expect_next_start_works();
}

TEST_F(Faults, SigtermToAWorkerSavesAndEndsTheRun) {
  Child child = start_training();
  ::kill(sandbox_.processes("worker").front(), SIGTERM);
  const Outcome outcome = sandbox_.finish(child, 20);
  EXPECT_NE(outcome.output.find("SIGTERM"), std::string::npos) << outcome.output;
  expect_nothing_left();
  const int64_t reached = sandbox_.metrics("run").rbegin()->first;
  EXPECT_TRUE(fs::exists(RunDir{sandbox_.path("run")}.checkpoint(reached)));
}

TEST_F(Faults, ARunDirectoryThatIsRemovedEndsTheRun) {
  // No checkpoint and no evaluation would come for a long time.
  Child child = sandbox_.start(
      sandbox_.train_arguments("run", 2, {"train.steps=1000000", "checkpoint.every=0"}));
  ASSERT_TRUE(
      eventually(Deadline::after(seconds(30)), [&] { return !sandbox_.metrics("run").empty(); }));
  fs::rename(sandbox_.path("run"), sandbox_.path("elsewhere"));
  const Outcome outcome = sandbox_.finish(child, 20);
  EXPECT_FALSE(outcome.status.ok());
  EXPECT_NE(outcome.output.find("the run directory " + sandbox_.path("run") + " was removed"),
            std::string::npos)
      << outcome.output;
  EXPECT_TRUE(
      eventually(Deadline::after(seconds(10)), [&] { return sandbox_.processes().empty(); }));
}

TEST_F(Faults, StatusAndStopReachARunningRun) {
  Child child = start_training();
  const auto status = sandbox_.run({"status", sandbox_.path("run"), "--json"});
  ASSERT_TRUE(status.status.ok()) << status.output;
  const auto json = nlohmann::json::parse(status.output);
  EXPECT_GE(json.at("step").get<int64_t>(), 20);
  EXPECT_EQ(json.at("members").size(), 4U) << "two workers, a data service, a node agent";
  EXPECT_TRUE(sandbox_.run({"stop", sandbox_.path("run")}).status.ok());
  const Outcome outcome = sandbox_.finish(child, 20);
  EXPECT_TRUE(outcome.status.ok()) << outcome.output;
  expect_nothing_left();
  EXPECT_FALSE(sandbox_.run({"status", sandbox_.path("run")}).status.ok())
      << "nobody is there any more";
}

TEST_F(Faults, ASecondCoordinatorOnTheSameRunDirectoryIsRefused) {
  Child child = start_training();
  const auto second = sandbox_.run(sandbox_.train_arguments("run", 1, kEndless), 20);
  EXPECT_FALSE(second.status.ok());
  EXPECT_NE(second.output.find(sandbox_.path("run")), std::string::npos) << second.output;
  EXPECT_FALSE(child.try_wait()) << "the first run must go on";
}

TEST_F(Faults, ACoordinatorStartedByHandIsResumedByItsOwnCommand) {
  const std::string run = sandbox_.path("run");
  Child coordinator =
      sandbox_.start({"coordinator", sandbox_.config(), "--listen", "tcp://127.0.0.1:0", "--set",
                      "run.dir=" + run, "--set", "train.steps=1000000", "--set",
                      "elastic.wait_timeout_s=0", "--set", "elastic.restarts=0"});
  ASSERT_TRUE(
      eventually(Deadline::after(seconds(20)), [&] { return fs::exists(RunDir{run}.endpoint()); }));
  const auto status = sandbox_.run({"status", run});
  EXPECT_NE(status.output.find("joining: a node agent (muster node) has yet to join"),
            std::string::npos)
      << status.output;
  std::string endpoint = read_file(RunDir{run}.endpoint());
  endpoint.pop_back();
  Child node = sandbox_.start({"node", "--coordinator", endpoint, "--workers", "1"});
  ASSERT_TRUE(
      eventually(Deadline::after(seconds(30)), [&] { return !sandbox_.metrics("run").empty(); }));
  ::kill(sandbox_.processes("worker").front(), SIGKILL);
  const Outcome outcome = sandbox_.finish(coordinator, 20);
  EXPECT_NE(outcome.output.find("waiting: a node agent (muster node) has yet to join"),
            std::string::npos)
      << outcome.output;
  EXPECT_NE(outcome.output.find("waiting: 0 of 1 workers have joined"), std::string::npos)
      << outcome.output;
  EXPECT_NE(outcome.output.find("with: muster coordinator " + sandbox_.config() +
                                " --listen tcp://127.0.0.1:0"),
            std::string::npos)
      << outcome.output;
  EXPECT_FALSE(sandbox_.finish(node, 20).status.ok());
  expect_nothing_left();
}

}  // namespace
}  // namespace muster
