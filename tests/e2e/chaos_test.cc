// Everything that can happen to a run, one after the other in random order: it trains on each time,
// and in the end nobody can tell from its losses and samples.
//   MUSTER_CHAOS_SEED     another order
//   MUSTER_CHAOS_SECONDS  how long; tools/chaos.py does the same for longer, and to networks
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <random>

#include "tests/e2e/elastic_fixture.h"

namespace muster {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Until training goes on after what ends or stops a process: five heartbeats of 0.5 s, the longest
// backoff of the node agent, and time to start on a busy machine.
constexpr seconds kPatience(10);

int from_environment(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

pid_t parent_of(pid_t pid) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("PPid:")) return std::stoi(line.substr(5));
  }
  return -1;
}

class Chaos : public ElasticNodes {
 protected:
  void SetUp() override {
    std::cout << "MUSTER_CHAOS_SEED=" << seed_ << '\n';
    random_.seed(static_cast<unsigned>(seed_));
  }

  int below(size_t count) { return static_cast<int>(random_() % count); }

  void say(const std::string& what) {
    const std::chrono::duration<double> at = Deadline::Clock::now() - began_;
    std::cout << fmt::format("{:6.2f} s, step {}: {}\n", at.count(), step(), what);
  }

  pid_t any(const std::string& command) {
    const auto pids = sandbox_.processes(command);
    return pids.empty() ? -1 : pids[static_cast<size_t>(below(pids.size()))];
  }

  void kill(const std::string& command) {
    const pid_t pid = any(command);
    if (pid < 0) return;  // the last one's successor is not there yet
    say(fmt::format("SIGKILL to a {} ({})", command, pid));
    kill_one(pid);
  }

  size_t workers_of(const Child& node) const {
    const auto workers = sandbox_.processes("worker");
    return static_cast<size_t>(std::count_if(workers.begin(), workers.end(), [&](pid_t worker) {
      return parent_of(worker) == node.pid();
    }));
  }

  void something_happens() {
    using Happening = void (Chaos::*)();
    static constexpr Happening kHappenings[] = {&Chaos::worker_is_killed,
                                                &Chaos::worker_is_killed,
                                                &Chaos::data_service_is_killed,
                                                &Chaos::coordinator_is_killed,
                                                &Chaos::coordinator_is_killed_in_a_recovery,
                                                &Chaos::two_workers_are_killed,
                                                &Chaos::worker_is_stopped,
                                                &Chaos::node_is_killed,
                                                &Chaos::node_leaves,
                                                &Chaos::workers_are_scaled,
                                                &Chaos::worker_is_drained};
    may_lose_state_ = false;
    (this->*kHappenings[below(std::size(kHappenings))])();
  }

  void worker_is_killed() {
    kill("worker");
    expect_recovery("a worker was killed", seconds(5));
  }

  void data_service_is_killed() {
    kill("data");
    expect_recovery("a data service was killed", kPatience);
  }

  void coordinator_is_killed() {
    say("SIGKILL to the coordinator");
    replace_coordinator();
    expect_recovery("the coordinator was killed", kPatience);
  }

  void coordinator_is_killed_in_a_recovery() {
    kill("worker");
    const Deadline moment = Deadline::after(milliseconds(below(300)));
    eventually(moment, [] { return false; });
    say("SIGKILL to the coordinator");
    replace_coordinator();
    expect_recovery("a worker and the coordinator were killed", kPatience);
  }

  void two_workers_are_killed() {
    may_lose_state_ = true;
    kill("worker");
    kill("worker");
    expect_recovery("two workers were killed", kPatience);
  }

  void worker_is_stopped() {
    const pid_t pid = any("worker");
    const milliseconds length(200 + below(3500));
    say(fmt::format("SIGSTOP to a worker ({}) for {:.1f} s", pid,
                    std::chrono::duration<double>(length).count()));
    ::kill(pid, SIGSTOP);
    const Deadline moment = Deadline::after(length);
    eventually(moment, [] { return false; });
    ::kill(pid, SIGCONT);
    expect_progress("a worker was stopped", kPatience);
  }

  void node_is_killed() {
    Child& node = nodes_[static_cast<size_t>(below(nodes_.size()))];
    const size_t workers = workers_of(node);
    if (workers >= world()) return;  // nobody would be left
    // The mirror of one worker may be on the other, where the nodes are of different sizes.
    may_lose_state_ = workers > 1;
    say(fmt::format("SIGKILL to a node agent ({}) with {} workers", node.pid(), workers));
    kill_one(node.pid());
    expect_recovery("a node was killed", kPatience);
    forget(&node);
    another_node();
  }

  void node_leaves() {
    Child& node = nodes_[static_cast<size_t>(below(nodes_.size()))];
    const size_t workers = workers_of(node);
    if (workers >= world()) return;
    say(fmt::format("SIGTERM to a node agent ({}) with {} workers", node.pid(), workers));
    node.signal(SIGTERM);
    expect_progress("a node was asked to leave");
    const Outcome outcome = sandbox_.finish(node, 20);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.to_string() << outcome.output;
    forget(&node);
    another_node();
  }

  void workers_are_scaled() {
    const int workers = 2 + below(3);
    say(fmt::format("muster scale --workers {}", workers));
    scale(workers);
    expect_progress("muster scale", kPatience);
  }

  void worker_is_drained() {
    if (world() < 3) return;
    say("muster drain 1");
    const Outcome outcome = sandbox_.run({"drain", sandbox_.path("run"), "1"});
    EXPECT_TRUE(outcome.status.ok()) << outcome.output;
    expect_progress("muster drain");
  }

  void forget(Child* node) {
    node->kill();
    nodes_.erase(nodes_.begin() + (node - nodes_.data()));
  }

  void another_node() {
    const int workers = 1 + below(2);
    say(fmt::format("another node with {} workers", workers));
    add_node(workers);
  }

  const int seed_ = from_environment("MUSTER_CHAOS_SEED", 1);
  std::mt19937 random_;
  const Deadline::Clock::time_point began_ = Deadline::Clock::now();
  bool may_lose_state_ = false;  // by what happened last
};

TEST_F(Chaos, NothingThatHappensToARunShowsInIt) {
  start_nodes(2, 2, {"checkpoint.every=10", "elastic.mirror_every=1"});
  const Deadline end = Deadline::after(seconds(from_environment("MUSTER_CHAOS_SECONDS", 20)));
  size_t losses = 0;
  while (!end.passed() && !HasFailure()) {
    // Alone a worker has no mirror, and nobody could be taken from the run.
    ASSERT_TRUE(eventually(Deadline::after(2 * kPatience), [&] { return world() >= 2; }))
        << "one worker is left at step " << step();
    // Anywhere in a step, or in what the last event has set going.
    const Deadline moment = Deadline::after(milliseconds(below(500)));
    eventually(moment, [] { return false; });
    something_happens();
    const size_t now = events("state_lost").size();
    EXPECT_TRUE(now == losses || may_lose_state_) << "the state was lost";
    losses = now;
  }
  ASSERT_FALSE(HasFailure());
  scale(3);
  EXPECT_TRUE(trains_with(3)) << "all are there again";
  expect_steps_redone_at_most(1);
  expect_undisturbed();
}

}  // namespace
}  // namespace muster
