// Runs that change their size while they train, on purpose and by force: the loss curve and the
// samples are those of an undisturbed run.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <random>
#include <set>

#include "common/run_dir.h"
#include "tests/e2e/sandbox.h"

namespace muster {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class Elastic : public testing::Test {
 protected:
  void TearDown() override {
    if (!HasFailure()) return;
    for (const auto& event : sandbox_.events("run")) std::cerr << event << '\n';
  }
  // Longer than any test; no setting depends on the number of steps.
  std::vector<std::string> settings(const std::vector<std::string>& more = {}) const {
    // At the usual learning rate training is chaotic enough to magnify the order of sums.
    std::vector<std::string> all = {"train.steps=1000000",
                                    "schedule.type=constant",
                                    "optimizer.lr=3e-4",
                                    "elastic.heartbeat_s=0.5",
                                    "elastic.join_window_s=0.05",
                                    "elastic.restarts=1000",
                                    "model.width=64",
                                    "model.ffn=128",
                                    "train.sequence_length=64"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  void start(int workers, const std::vector<std::string>& more = {}) {
    run_.emplace(sandbox_.start(sandbox_.train_arguments("run", workers, settings(more))));
    ASSERT_TRUE(reaches_step(3)) << "it does not begin to train";
  }
  bool reaches_step(int64_t step, seconds patience = seconds(30)) const {
    return eventually(Deadline::after(patience), [&] {
      const auto metrics = sandbox_.metrics("run");
      return !metrics.empty() && metrics.rbegin()->first >= step;
    });
  }
  int64_t step() const {
    const auto metrics = sandbox_.metrics("run");
    return metrics.empty() ? 0 : metrics.rbegin()->first;
  }
  // A step of a generation with so many workers is committed, after `after`.
  bool trains_with(size_t workers, int64_t after = 0) const {
    return eventually(Deadline::after(seconds(20)), [&] {
      const auto metrics = sandbox_.metrics("run");
      return !metrics.empty() && metrics.rbegin()->first > after &&
             metrics.rbegin()->second.at("world") == workers;
    });
  }
  // Goes on to train from where it is now, within five seconds.
  void expect_progress(const std::string& after_what) {
    const int64_t now = step();
    EXPECT_TRUE(reaches_step(now + 3, seconds(5))) << "stuck after " << after_what;
  }
  void scale(int workers) {
    const Outcome outcome =
        sandbox_.run({"scale", sandbox_.path("run"), "--workers", std::to_string(workers)});
    EXPECT_TRUE(outcome.status.ok()) << outcome.output;
  }
  void stop() {
    run_->signal(SIGTERM);
    const Outcome outcome = sandbox_.finish(*run_, 30);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.to_string() << outcome.output;
    EXPECT_TRUE(
        eventually(Deadline::after(seconds(10)), [&] { return sandbox_.processes().empty(); }));
  }
  std::vector<nlohmann::json> events(const std::string& kind) const {
    std::vector<nlohmann::json> found;
    for (const auto& event : sandbox_.events("run")) {
      if (event.at("kind") == kind) found.push_back(event);
    }
    return found;
  }
  // Ends the run and compares it with one that nothing happened to.
  void expect_undisturbed() {
    stop();
    const auto losses = sandbox_.losses("run");
    ASSERT_FALSE(losses.empty());
    EXPECT_EQ(sandbox_.metrics("run").rbegin()->first, static_cast<int64_t>(losses.size()))
        << "a step is missing";
    auto fixed = settings();
    fixed.push_back(fmt::format("train.steps={}", losses.size()));
    sandbox_.train("fixed", 2, fixed);
    expect_same_losses(sandbox_.losses("fixed"), losses, "the run that changed");
    const auto expected = sandbox_.samples("fixed");
    const auto samples = sandbox_.samples("run");
    ASSERT_EQ(samples.size(), expected.size());
    for (const auto& [at, line] : expected) {
      EXPECT_EQ(line.at("samples"), samples.at(at).at("samples")) << "step " << at;
    }
  }

  Sandbox sandbox_;
  std::optional<Child> run_;
};

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
  start(3, {"checkpoint.every=7"});
  std::mt19937 random(asked == nullptr ? 1 : std::random_device{}());
  for (int i = 0; i < kills; ++i) {
    ASSERT_TRUE(eventually(Deadline::after(seconds(10)),
                           [&] { return sandbox_.processes("worker").size() >= 2; }));
    // Anywhere in a step, or in what the last kill has set going.
    const Deadline moment = Deadline::after(milliseconds(random() % 400));
    eventually(moment, [] { return false; });
    const auto workers = sandbox_.processes("worker");
    ASSERT_FALSE(workers.empty());
    ::kill(workers[random() % workers.size()], SIGKILL);
    expect_progress(fmt::format("kill {}", i));
    if (HasFailure()) break;
  }
  EXPECT_TRUE(trains_with(3)) << "all are there again";
  for (const auto& event : events("steps_redone")) {
    const std::string reason = event.at("reason");
    int64_t first = 0;
    int64_t last = 0;
    ASSERT_EQ(std::sscanf(reason.c_str(), "steps %ld to %ld", &first, &last), 2) << reason;
    EXPECT_EQ(first, last) << reason;
  }
  EXPECT_TRUE(events("state_lost").empty());
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

// Several nodes, as `muster coordinator` and `muster node` make them.
class ElasticNodes : public Elastic {
 protected:
  void start_nodes(int nodes, int workers_each, const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {
        "coordinator", sandbox_.config(),
        "--listen",    "tcp://127.0.0.1:0",
        "--set",       "run.dir=" + sandbox_.path("run"),
        "--set",       fmt::format("parallel.workers={}", nodes * workers_each)};
    for (const auto& setting : settings(more)) {
      arguments.emplace_back("--set");
      arguments.push_back(setting);
    }
    run_.emplace(sandbox_.start(arguments));
    const RunDir run{sandbox_.path("run")};
    ASSERT_TRUE(eventually(Deadline::after(seconds(20)),
                           [&] { return std::filesystem::exists(run.endpoint()); }));
    endpoint_ = read_file(run.endpoint());
    endpoint_.pop_back();
    for (int i = 0; i < nodes; ++i) add_node(workers_each);
    ASSERT_TRUE(reaches_step(3)) << "it does not begin to train";
  }
  void add_node(int workers) {
    nodes_.push_back(
        sandbox_.start({"node", "--coordinator", endpoint_, "--workers", std::to_string(workers)}));
  }

  std::string endpoint_;
  std::vector<Child> nodes_;
};

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

}  // namespace
}  // namespace muster
