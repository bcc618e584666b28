// A whole run of the demo's model on the CPU, as a user starts it: how soon the first step is done,
// how fast it trains, and how fast PyTorch trains the same model on the same cores before and
// after.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "common/error.h"
#include "common/files.h"
#include "common/process.h"
#include "common/run_dir.h"
#include "coordinator/json_lines.h"
#include "tools/muster/bench.h"
#include "tools/muster/bench_corpus.h"

namespace muster {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr int kSteps = 250;
constexpr int kWarmupSteps = 20;  // do not count for the speed
constexpr Seconds kPatience(300);
constexpr const char* kPytorchScript = "tools/bench_pytorch.py";

std::string config_toml(const std::string& corpus, const std::string& folder) {
  return fmt::format(R"([run]
dir = "{1}/run"
device = "cpu"
[model]
width = 128
layers = 4
heads = 4
kv_heads = 2
ffn = 384
[data]
sources = ["{0}"]
cache_dir = "{1}/cache"
[train]
steps = {2}
global_batch = 16
micro_batch = 8
sequence_length = 128
)",
                     corpus, folder, kSteps);
}

int cores() {
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

struct MusterRun {
  double first_step_s = 0.0;  // from the command to the first committed step
  double tokens_per_s = 0.0;
};

MusterRun run_muster(const std::string& folder, int workers) {
  std::filesystem::remove_all(folder + "/run");
  const auto begin = std::chrono::steady_clock::now();
  Child child = Child::spawn({.name = "muster train",
                              .argv = {own_program(), "train", folder + "/bench.toml", "--workers",
                                       std::to_string(workers)},
                              .environment = {},
                              .output_path = folder + "/output"});
  const std::string metrics = RunDir{folder + "/run"}.metrics();
  MusterRun run;
  const Deadline deadline = Deadline::after(kPatience);
  while (!child.wait(Deadline::after(std::chrono::milliseconds(5))) && !deadline.passed()) {
    if (run.first_step_s == 0.0 && !read_json_lines(metrics).empty()) {
      run.first_step_s = Seconds(std::chrono::steady_clock::now() - begin).count();
    }
  }
  if (!child.try_wait() || !child.try_wait()->ok()) {
    throw Error("the benchmark's run failed:\n" + read_file(folder + "/output"));
  }
  std::vector<double> speeds;
  for (const auto& line : read_json_lines(metrics)) {
    if (line.at("step").get<int>() > kWarmupSteps)
      speeds.push_back(line.at("tokens_per_s").get<double>());
  }
  const auto middle = speeds.begin() + static_cast<int64_t>(speeds.size() / 2);
  std::nth_element(speeds.begin(), middle, speeds.end());
  run.tokens_per_s = *middle;
  return run;
}

// Tokens/s of the same model in PyTorch; nothing where no python3 has it, or outside a source tree.
std::optional<double> run_pytorch(const std::string& folder) {
  if (!std::filesystem::exists(kPytorchScript)) return std::nullopt;
  for (const char* python : {"/usr/bin/python3", "/usr/local/bin/python3"}) {
    if (!std::filesystem::exists(python)) continue;
    const std::string output = folder + "/pytorch";
    std::filesystem::remove(output);
    Child child =
        Child::spawn({.name = "PyTorch",
                      .argv = {python, kPytorchScript, "--width", "128", "--layers", "4", "--heads",
                               "4", "--kv-heads", "2", "--ffn", "384", "--sequence-length", "128",
                               "--batch", "16", "--threads", std::to_string(cores())},
                      .environment = {},
                      .output_path = output});
    const auto status = child.wait(Deadline::after(kPatience));
    if (!status || !status->ok()) continue;
    const auto json = nlohmann::json::parse(read_file(output), nullptr, /*allow_exceptions=*/false);
    if (json.is_object()) return json.at("tokens_per_s").get<double>();
  }
  return std::nullopt;
}

}  // namespace

std::vector<BenchResult> bench_train() {
  const TempDir folder;
  const TempDir scratch;
  write_file_atomic(folder.path() + "/bench.toml",
                    config_toml(bench_corpus(scratch.path()), folder.path()));
  const int workers = cores();
  const auto before = run_pytorch(folder.path());
  const MusterRun first = run_muster(folder.path(), workers);
  const MusterRun second = run_muster(folder.path(), workers);
  const auto after = run_pytorch(folder.path());

  const double ours = std::max(first.tokens_per_s, second.tokens_per_s);
  std::vector<BenchResult> results = {
      {"first step, dataset never seen", first.first_step_s, "s",
       "from the command, corpus read and indexed"},
      {"first step, dataset seen before", second.first_step_s, "s", "from the command"},
      {fmt::format("training, {} workers", workers), ours, "tokens/s", "the better of two runs"}};
  if (!before || !after) {
    results.push_back(
        {"PyTorch", 0.0, "tokens/s",
         "not measured: needs Debian's python3-torch, and the source tree as working directory"});
    return results;
  }
  const double theirs = std::max(*before, *after);
  results.push_back(
      {fmt::format("PyTorch, {} threads", cores()), theirs, "tokens/s", "the better of two runs"});
  results.push_back({"ratio", ours / theirs, "x", "of PyTorch"});
  return results;
}

}  // namespace muster
