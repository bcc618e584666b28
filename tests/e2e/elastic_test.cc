// Runs that change their size while they train, on purpose and by force: the loss curve and the
// samples are those of an undisturbed run.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "tests/e2e/elastic_fixture.h"

namespace muster {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST_F(Elastic, PlannedChangesDoNotShow) {
  start(2);
  int64_t at = step();
  for (const int workers : {3, 5, 2, 1, 4}) {
    scale(workers);
    EXPECT_TRUE(trains_with(static_cast<size_t>(workers), at)) << workers << " workers";
    expect_progress(fmt::format("going to {} workers", workers));
    at = step();
  }
  EXPECT_TRUE(reaches_step(100));
  EXPECT_TRUE(events("halt").empty());
  EXPECT_TRUE(events("steps_redone").empty());
  EXPECT_TRUE(events("worker_lost").empty()) << "leavers end well";
  expect_undisturbed();
}

// MUSTER_KILLS: how many; every moment is equally likely.
TEST_F(Elastic, AWorkerMayBeKilledAtAnyMoment) {
  const char* asked = std::getenv("MUSTER_KILLS");
  const int kills = asked == nullptr ? 8 : std::atoi(asked);
  // Rounding grows with the number of steps, so they are long, and nobody waits for restarts.
  start(3, {"checkpoint.every=7", "elastic.mirror_every=1", "elastic.restarts=0",
            "train.global_batch=48"});
  std::mt19937 random(asked == nullptr ? 1 : std::random_device{}());
  for (int i = 0; i < kills && !HasFailure(); ++i) {
    scale(3);
    // A worker that is alone has no mirror.
    ASSERT_TRUE(eventually(Deadline::after(seconds(10)), [&] { return world() >= 2; }));
    // Anywhere in a step, or in the coming of those who replace the ones killed before.
    const Deadline moment = Deadline::after(milliseconds(random() % 400));
    eventually(moment, [] { return false; });
    const auto workers = sandbox_.processes("worker");
    ASSERT_FALSE(workers.empty());
    kill_one(workers[random() % workers.size()]);
    expect_recovery(fmt::format("kill {}", i), seconds(5));
  }
  scale(3);
  EXPECT_TRUE(trains_with(3)) << "all are there again";
  EXPECT_TRUE(events("state_lost").empty());
  expect_steps_redone_at_most(1);
  expect_undisturbed();
}

// What is kept of a worker may then be as old as two mirrors, and what is handed out ahead.
TEST_F(Elastic, MirrorsMayBeSentBehindTheSteps) {
  start(3, {"checkpoint.every=1000", "elastic.mirror_every=3"});
  for (int i = 0; i < 3 && !HasFailure(); ++i) {
    ASSERT_TRUE(trains_with(3));
    EXPECT_TRUE(reaches_step(step() + 12));
    kill_one(sandbox_.processes("worker").front());
    expect_recovery(fmt::format("kill {}", i), seconds(5));
  }
  EXPECT_TRUE(events("state_lost").empty());
  expect_steps_redone_at_most(12);
  expect_undisturbed();
}

// It is stopped after it has joined and before it is in a generation.
TEST_F(Elastic, ANewcomerThatHangsHoldsNobodyUp) {
  start(2, {"elastic.join_window_s=2"});
  const auto before = sandbox_.processes("worker");
  scale(3);
  const auto joined = [&] {
    const auto all = events("member_joined");
    return std::count_if(all.begin(), all.end(), [](const auto& event) {
      return std::string(event.at("reason")).find("worker") == 0;
    });
  };
  ASSERT_TRUE(eventually(Deadline::after(seconds(20)), [&] { return joined() == 3; }));
  for (const pid_t pid : sandbox_.processes("worker")) {
    if (std::find(before.begin(), before.end(), pid) == before.end()) ::kill(pid, SIGSTOP);
  }
  EXPECT_TRUE(trains_with(3, step())) << "another one takes its place";
  EXPECT_EQ(events("worker_lost").size(), 1U);
  EXPECT_TRUE(events("halt").empty());
  EXPECT_TRUE(events("steps_redone").empty());
  expect_undisturbed();
}

TEST_F(Elastic, AWorkerThatIsAskedToGoHandsOverAndEndsWell) {
  start(3);
  ::kill(sandbox_.processes("worker").front(), SIGTERM);
  EXPECT_TRUE(trains_with(2));
  EXPECT_TRUE(eventually(Deadline::after(seconds(10)),
                         [&] { return sandbox_.processes("worker").size() == 2; }));
  EXPECT_TRUE(events("halt").empty());
  const Outcome drained = sandbox_.run({"drain", sandbox_.path("run"), "1"});
  EXPECT_TRUE(drained.status.ok()) << drained.output;
  EXPECT_TRUE(trains_with(1));
  EXPECT_TRUE(events("steps_redone").empty());
  expect_undisturbed();
}

TEST_F(Elastic, TwoOfThreeLostTogetherFallBackToTheCheckpoint) {
  start(3, {"checkpoint.every=5"});
  ASSERT_TRUE(reaches_step(12));
  const auto workers = sandbox_.processes("worker");
  ASSERT_EQ(workers.size(), 3U);
  ::kill(workers[0], SIGSTOP);  // so that nobody gets further in between
  ::kill(workers[1], SIGKILL);
  ::kill(workers[2], SIGKILL);
  ::kill(workers[0], SIGCONT);
  expect_progress("the loss of two workers");
  EXPECT_TRUE(trains_with(3));
  EXPECT_EQ(events("state_lost").size(), 1U);
  expect_undisturbed();
}

TEST_F(Elastic, AKilledDataServiceIsReplacedAndNothingElseChanges) {
  start(2);
  const auto before = sandbox_.processes("data");
  ASSERT_EQ(before.size(), 1U);
  ::kill(before.front(), SIGKILL);
  expect_progress("the loss of the data service");
  EXPECT_TRUE(events("halt").empty());
  expect_undisturbed();
}

TEST_F(Elastic, AStoppedWorkerIsReplacedAndDoesNotComeBack) {
  start(3);
  const pid_t stopped = sandbox_.processes("worker").front();
  ::kill(stopped, SIGSTOP);
  const int64_t at = step();
  EXPECT_TRUE(reaches_step(at + 10, seconds(10)));
  ::kill(stopped, SIGCONT);
  EXPECT_TRUE(eventually(Deadline::after(seconds(10)), [&] {
    const auto workers = sandbox_.processes("worker");
    return std::find(workers.begin(), workers.end(), stopped) == workers.end();
  }));
  EXPECT_TRUE(trains_with(3));
  expect_undisturbed();
}

TEST_F(Elastic, AKilledCoordinatorIsStartedAnewAndGoesOn) {
  start(3);
  for (int i = 0; i < 2; ++i) {
    const auto coordinators = sandbox_.processes("coordinator");
    ASSERT_EQ(coordinators.size(), 1U);
    ::kill(coordinators.front(), SIGKILL);
    const int64_t at = step();
    EXPECT_TRUE(reaches_step(at + 10, seconds(10)));
  }
  EXPECT_TRUE(events("worker_lost").empty());
  EXPECT_TRUE(events("state_lost").empty());
  EXPECT_TRUE(trains_with(3));
  expect_undisturbed();
}

TEST_F(Elastic, AKilledCoordinatorCostsALoneWorkerNoStep) {
  start(1, {"checkpoint.every=1000"});
  const auto coordinators = sandbox_.processes("coordinator");
  ASSERT_EQ(coordinators.size(), 1U);
  ::kill(coordinators.front(), SIGKILL);
  const int64_t at = step();
  // By then the node agent has found the new one too.
  EXPECT_TRUE(reaches_step(at + 300, seconds(20)));
  EXPECT_EQ(events("restored").size(), 1U);
  EXPECT_TRUE(events("state_lost").empty());
  EXPECT_TRUE(events("steps_redone").empty());
  expect_undisturbed();
}

TEST_F(Elastic, AKilledNodeAgentIsReplacedFromTheCheckpoint) {
  start(2, {"checkpoint.every=5"});
  ASSERT_TRUE(reaches_step(12));
  const auto agents = sandbox_.processes("node");
  ASSERT_EQ(agents.size(), 1U);
  ::kill(agents.front(), SIGKILL);
  const int64_t at = step();
  EXPECT_TRUE(reaches_step(at + 10, seconds(15)));
  expect_undisturbed();
}

TEST_F(ElasticNodes, NodesComeAndGoAndDie) {
  start_nodes(2, 1);
  add_node(2);
  EXPECT_TRUE(trains_with(4));
  nodes_[0].signal(SIGTERM);
  EXPECT_TRUE(trains_with(3));
  EXPECT_TRUE(sandbox_.finish(nodes_[0], 20).status.ok()) << "asked to leave, it ends well";
  EXPECT_TRUE(events("halt").empty());
  // The mirrors of a node lie on another one.
  nodes_[1].signal(SIGKILL);
  expect_progress("the death of a node");
  EXPECT_TRUE(trains_with(2));
  EXPECT_TRUE(events("state_lost").empty());
  add_node(1);
  EXPECT_TRUE(trains_with(3));
  expect_undisturbed();
}

TEST_F(ElasticNodes, WithoutACoordinatorTheWorkersSaveAndLeave) {
  start_nodes(2, 1, {"elastic.coordinator_timeout_s=2", "checkpoint.every=1000"});
  run_->kill();
  for (Child& node : nodes_) EXPECT_FALSE(sandbox_.finish(node, 20).status.ok());
  EXPECT_TRUE(sandbox_.processes().empty());
  const int64_t at = step();
  nodes_.clear();
  replace_coordinator();
  add_node(1);
  add_node(1);
  ASSERT_TRUE(
      eventually(Deadline::after(seconds(20)), [&] { return !events("checkpoint").empty(); }));
  const int64_t saved = events("checkpoint").front().at("step");
  EXPECT_GE(saved, at);
  EXPECT_TRUE(reaches_step(saved + 3));
  EXPECT_TRUE(events("state_lost").empty());
  EXPECT_TRUE(events("steps_redone").empty());
  expect_undisturbed();
}

}  // namespace
}  // namespace muster
