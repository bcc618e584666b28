// A place for end-to-end tests: a temporary folder with a small generated corpus, and the real
// program run in it as a user would.
#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "common/files.h"
#include "common/process.h"

namespace muster {

struct Outcome {
  ExitStatus status;
  std::string output;  // stdout and stderr
};

class Sandbox {
 public:
  // Writes the corpus and a config of a tiny model on it: 50 steps, 12 samples each, on the CPU.
  Sandbox();
  // Kills what still runs.
  ~Sandbox();

  std::string path(const std::string& name) const { return dir_.path() + "/" + name; }
  std::string corpus() const { return path("corpus"); }
  std::string config() const { return path("tiny.toml"); }

  // Starts `muster ARGS…`, its output going to a file of its own.
  Child start(const std::vector<std::string>& arguments);
  // Starts and waits; fails the test at the deadline.
  Outcome run(const std::vector<std::string>& arguments, double timeout_s = 60);
  // `muster train tiny.toml` into run directory `name`, with settings; expects success.
  Outcome train(const std::string& name, int workers,
                const std::vector<std::string>& settings = {});
  // The arguments of the same command.
  std::vector<std::string> train_arguments(const std::string& name, int workers,
                                           const std::vector<std::string>& settings = {}) const;
  // Waits for a started command. Fails the test at the deadline.
  Outcome finish(Child& child, double timeout_s = 60);

  // metrics.jsonl by step (the last line of a step counts), events.jsonl, samples.jsonl of a run
  // directory.
  std::map<int64_t, nlohmann::json> metrics(const std::string& name) const;
  std::vector<nlohmann::json> events(const std::string& name) const;
  std::map<int64_t, nlohmann::json> samples(const std::string& name) const;
  std::vector<double> losses(const std::string& name) const;

  // Processes started from here that are still alive, with their command ("worker", "data", …).
  std::map<pid_t, std::string> processes() const;
  std::vector<pid_t> processes(const std::string& command) const;
  // SIGKILL to all of them.
  void kill_everything() const;

 private:
  TempDir dir_{"muster-e2e"};
  std::string tag_;
  std::map<pid_t, std::string> outputs_;
  int started_ = 0;
};

// Expects two loss curves to agree up to the order of float32 sums (1e-5, relative).
void expect_same_losses(const std::vector<double>& a, const std::vector<double>& b,
                        const std::string& what);

// Polls until `condition` holds; false at the deadline.
bool eventually(Deadline deadline, const std::function<bool()>& condition);

// Text of about `bytes` bytes that looks like language to a small model; a pure function of `seed`.
std::string generated_text(uint64_t seed, size_t bytes);

}  // namespace muster
