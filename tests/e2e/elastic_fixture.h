// Runs whose workers come and go while they train, and what must hold for them. After a failed test
// the run's events are printed.
#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/e2e/sandbox.h"

namespace muster {

// One machine: `muster train`.
class Elastic : public testing::Test {
 protected:
  void TearDown() override;

  // `more`: settings, of the undisturbed run too.
  void start(int workers, const std::vector<std::string>& more = {});
  void scale(int workers);
  // Asks the run to end and expects that it does, with all its processes.
  void stop();

  // The newest line of metrics.jsonl; null before the first one.
  nlohmann::json newest() const;
  int64_t step() const;
  bool reaches_step(int64_t step, std::chrono::seconds patience = std::chrono::seconds(30)) const;
  // A step of a generation with so many workers is committed, after `after`.
  bool trains_with(size_t workers, int64_t after = 0) const;
  // Goes on to train from where it is now, within `patience`.
  void expect_progress(const std::string& after_what,
                       std::chrono::seconds patience = std::chrono::seconds(5)) const;
  // SIGKILL; is_settled() knows of it.
  void kill_one(pid_t pid);
  // The coordinator has noticed all that was killed, and no change of generation is under way.
  bool is_settled();
  // Training has gone on, in a generation without what was killed, within `patience`.
  void expect_recovery(const std::string& after_what, std::chrono::seconds patience);
  // Workers in the newest step.
  size_t world() const { return newest().at("world"); }
  std::vector<nlohmann::json> events(const std::string& kind) const;
  // A crash had no more steps than these trained twice, unless the state was lost.
  void expect_steps_redone_at_most(int64_t most) const;
  // Ends the run and compares losses and samples with those of one that nothing happened to.
  void expect_undisturbed();

  Sandbox sandbox_;
  std::optional<Child> run_;
  size_t coordinators_ = 1;  // started

 private:
  friend class ElasticNodes;
  // Of a run that is longer than any test; no setting depends on the number of steps.
  std::vector<std::string> settings(const std::vector<std::string>& more) const;

  std::vector<std::string> settings_;
  std::set<pid_t> unnoticed_;  // killed, and no event tells of it yet
  bool changing_ = false;
  size_t restored_ = 0;
  uint64_t events_read_ = 0;  // bytes
};

// Several nodes, as `muster coordinator` (run_) and `muster node` make them.
class ElasticNodes : public Elastic {
 protected:
  void start_nodes(int nodes, int workers_each, const std::vector<std::string>& more = {});
  void add_node(int workers);
  // SIGKILL, and another one with the same command at the same endpoint.
  void replace_coordinator();

  std::string endpoint_;
  std::vector<Child> nodes_;

 private:
  Child start_coordinator(const std::string& listen);

  std::vector<std::string> coordinator_settings_;
};

}  // namespace muster
