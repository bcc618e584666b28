#include "tests/e2e/sandbox.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "common/identity.h"
#include "common/rng.h"
#include "coordinator/json_lines.h"

namespace muster {

namespace fs = std::filesystem;

namespace {

constexpr const char* kTagVariable = "MUSTER_TEST_SANDBOX";

constexpr const char* kConfig = R"(
[run]
name = "tiny"
device = "cpu"
[model]
width = 32
layers = 3
heads = 2
kv_heads = 1
ffn = 48
[data]
sources = ["corpus"]
cache_dir = "cache"
held_out = 0.1
[train]
steps = 50
global_batch = 12
micro_batch = 3
sequence_length = 32
eval_samples = 8
[optimizer]
lr = 3e-3
[schedule]
warmup_steps = 10
[metrics]
debug_samples = true
)";

std::string read_proc(pid_t pid, const char* name) {
  std::ifstream file(fmt::format("/proc/{}/{}", pid, name), std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  return content.str();
}

std::vector<std::string> split_nul(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, '\0');) parts.push_back(part);
  return parts;
}

bool is_zombie(pid_t pid) {
  const std::string stat = read_proc(pid, "stat");
  const auto end_of_name = stat.rfind(')');
  return end_of_name != std::string::npos && stat.compare(end_of_name, 4, ") Z ") == 0;
}

}  // namespace

void expect_same_losses(const std::vector<double>& a, const std::vector<double>& b,
                        const std::string& what) {
  constexpr double kReductionOrder = 1e-5;
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_LE(std::abs(a[i] - b[i]), kReductionOrder * std::abs(a[i]))
        << what << ", step " << i + 1;
  }
}

bool eventually(Deadline deadline, const std::function<bool()>& condition) {
  while (!condition()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

std::string generated_text(uint64_t seed, size_t bytes) {
  static constexpr const char* kWords[] = {
      "the ",    "kernel ", "driver ", "reads ", "a ",    "page ", "and ",   "writes ",
      "memory ", "to ",     "disk. ",  "when ",  "lock ", "is ",   "held, ", "\n"};
  const CounterRng rng(seed, RandomPurpose::kInit, 7);
  std::string text;
  for (uint64_t i = 0; text.size() < bytes; ++i) text += kWords[rng.bits(i) % std::size(kWords)];
  return text;
}

Sandbox::Sandbox() : tag_(random_id()) {
  make_dirs(corpus() + "/sub");
  for (int i = 0; i < 24; ++i) {
    const std::string name = fmt::format("{}/{}doc{:02}.{}", corpus(), i % 3 == 0 ? "sub/" : "", i,
                                         i % 2 == 0 ? "txt" : "rst");
    write_file_atomic(name, generated_text(i, 300 + 97 * static_cast<size_t>(i)));
  }
  write_file_atomic(config(), kConfig);
}

Sandbox::~Sandbox() {
  kill_everything();
}

Child Sandbox::start(const std::vector<std::string>& arguments) {
  const std::string output = path(fmt::format("output-{}", started_++));
  std::vector<std::string> argv = {MUSTER_PROGRAM};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  Child child = Child::spawn({.name = "muster " + arguments.at(0),
                              .argv = argv,
                              .environment = {{kTagVariable, tag_}},
                              .output_path = output});
  outputs_[child.pid()] = output;
  return child;
}

Outcome Sandbox::finish(Child& child, double timeout_s) {
  const auto status = child.wait(Deadline::after(std::chrono::duration<double>(timeout_s)));
  const std::string output = read_file(outputs_.at(child.pid()));
  if (!status) {
    ADD_FAILURE() << child.name() << " did not end within " << timeout_s << " s:\n" << output;
    return {child.kill(), output};
  }
  return {*status, output};
}

Outcome Sandbox::run(const std::vector<std::string>& arguments, double timeout_s) {
  Child child = start(arguments);
  return finish(child, timeout_s);
}

std::vector<std::string> Sandbox::train_arguments(const std::string& name, int workers,
                                                  const std::vector<std::string>& settings) const {
  std::vector<std::string> arguments = {"train",     config(),
                                        "--workers", std::to_string(workers),
                                        "--set",     "run.dir=\"" + path(name) + "\""};
  for (const auto& setting : settings) {
    arguments.emplace_back("--set");
    arguments.push_back(setting);
  }
  return arguments;
}

Outcome Sandbox::train(const std::string& name, int workers,
                       const std::vector<std::string>& settings) {
  Outcome outcome = run(train_arguments(name, workers, settings));
  std::string logs;
  if (!outcome.status.ok() && fs::exists(path(name) + "/logs")) {
    for (const auto& log : fs::directory_iterator(path(name) + "/logs")) {
      logs += "== " + log.path().string() + "\n" + read_file_tail(log.path(), 4000);
    }
  }
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.to_string() << ":\n" << outcome.output << logs;
  return outcome;
}

namespace {

std::map<int64_t, nlohmann::json> by_step(const std::vector<nlohmann::json>& lines) {
  std::map<int64_t, nlohmann::json> steps;
  for (const auto& line : lines) steps[line.at("step").get<int64_t>()] = line;
  return steps;
}

}  // namespace

std::map<int64_t, nlohmann::json> Sandbox::metrics(const std::string& name) const {
  return by_step(read_json_lines(path(name) + "/metrics.jsonl"));
}

std::vector<nlohmann::json> Sandbox::events(const std::string& name) const {
  return read_json_lines(path(name) + "/events.jsonl");
}

std::map<int64_t, nlohmann::json> Sandbox::samples(const std::string& name) const {
  return by_step(read_json_lines(path(name) + "/samples.jsonl"));
}

std::vector<double> Sandbox::losses(const std::string& name) const {
  std::vector<double> losses;
  for (const auto& [step, line] : metrics(name)) losses.push_back(line.at("loss").get<double>());
  return losses;
}

std::map<pid_t, std::string> Sandbox::processes() const {
  std::map<pid_t, std::string> found;
  const std::string wanted = fmt::format("{}={}", kTagVariable, tag_);
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const pid_t pid = std::stoi(name);
    const auto environment = split_nul(read_proc(pid, "environ"));
    if (std::find(environment.begin(), environment.end(), wanted) == environment.end()) continue;
    if (is_zombie(pid)) continue;
    const auto command = split_nul(read_proc(pid, "cmdline"));
    found[pid] = command.size() > 1 ? command[1] : "";
  }
  return found;
}

std::vector<pid_t> Sandbox::processes(const std::string& command) const {
  std::vector<pid_t> pids;
  for (const auto& [pid, name] : processes()) {
    if (name == command) pids.push_back(pid);
  }
  return pids;
}

void Sandbox::kill_everything() const {
  for (const auto& [pid, name] : processes()) ::kill(pid, SIGKILL);
}

}  // namespace muster
