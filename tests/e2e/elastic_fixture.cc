#include "tests/e2e/elastic_fixture.h"

#include <fmt/format.h>
#include <signal.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "common/run_dir.h"

namespace muster {

using std::chrono::seconds;

void Elastic::TearDown() {
  if (!HasFailure()) return;
  for (const auto& event : sandbox_.events("run")) std::cerr << event << '\n';
}

std::vector<std::string> Elastic::settings(const std::vector<std::string>& more) const {
  // At the usual learning rate training magnifies the order of sums: at 1e-4 past 1e-5 within 400
  // steps. A step left out or done twice still shows, as each changes the loss by more than 1e-4.
  std::vector<std::string> all = {"train.steps=1000000",
                                  "schedule.type=constant",
                                  "optimizer.lr=1e-5",
                                  "elastic.heartbeat_s=0.5",
                                  "elastic.join_window_s=0.05",
                                  "elastic.restarts=1000",
                                  "model.width=64",
                                  "model.ffn=128",
                                  "train.sequence_length=64"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

void Elastic::start(int workers, const std::vector<std::string>& more) {
  settings_ = settings(more);
  run_.emplace(sandbox_.start(sandbox_.train_arguments("run", workers, settings_)));
  ASSERT_TRUE(reaches_step(3)) << "it does not begin to train";
}

void Elastic::scale(int workers) {
  const Outcome outcome =
      sandbox_.run({"scale", sandbox_.path("run"), "--workers", std::to_string(workers)});
  EXPECT_TRUE(outcome.status.ok()) << outcome.output;
}

void Elastic::stop() {
  run_->signal(SIGTERM);
  const Outcome outcome = sandbox_.finish(*run_, 30);
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.to_string() << outcome.output;
  EXPECT_TRUE(eventually(Deadline::after(seconds(10)), [&] {
    return sandbox_.processes().empty();
  })) << testing::PrintToString(sandbox_.processes());
}

// Of its tail only: it is asked for often, and the file grows long.
nlohmann::json Elastic::newest() const {
  constexpr uint64_t kMoreThanALine = 4000;
  const std::string path = RunDir{sandbox_.path("run")}.metrics();
  if (!std::filesystem::exists(path)) return nullptr;
  const std::string tail = read_file_tail(path, kMoreThanALine);
  const size_t end = tail.rfind('\n');
  if (end == std::string::npos) return nullptr;
  const size_t before = end == 0 ? std::string::npos : tail.rfind('\n', end - 1);
  const size_t begin = before == std::string::npos ? 0 : before + 1;
  return nlohmann::json::parse(tail.substr(begin, end - begin));
}

int64_t Elastic::step() const {
  const auto line = newest();
  return line.is_null() ? 0 : line.at("step").get<int64_t>();
}

bool Elastic::reaches_step(int64_t step, seconds patience) const {
  return eventually(Deadline::after(patience), [&] { return this->step() >= step; });
}

bool Elastic::trains_with(size_t workers, int64_t after) const {
  return eventually(Deadline::after(seconds(20)), [&] {
    const auto line = newest();
    return !line.is_null() && line.at("step") > after && line.at("world") == workers;
  });
}

void Elastic::expect_progress(const std::string& after_what, seconds patience) const {
  const int64_t now = step();
  EXPECT_TRUE(reaches_step(now + 3, patience)) << "stuck after " << after_what << ": step "
                                               << step() << " after " << patience.count() << " s";
}

void Elastic::kill_one(pid_t pid) {
  unnoticed_.insert(pid);
  ::kill(pid, SIGKILL);
}

bool Elastic::is_settled() {
  std::ifstream file(RunDir{sandbox_.path("run")}.events());
  file.seekg(static_cast<std::streamoff>(events_read_));
  for (std::string line; std::getline(file, line) && !file.eof();) {
    events_read_ += line.size() + 1;
    const auto event = nlohmann::json::parse(line);
    const std::string kind = event.at("kind");
    const std::string reason = event.at("reason");
    if (kind.ends_with("_lost") || kind == "member_left") {
      std::erase_if(unnoticed_, [&](pid_t pid) {
        return reason.find(fmt::format("pid {} ", pid)) != std::string::npos;
      });
    }
    if (kind == "restored") ++restored_;
    if (kind == "halt" || kind == "restored" || kind == "waiting" || kind == "generation") {
      changing_ = true;
    }
    if (kind == "generation_started") changing_ = false;
  }
  return unnoticed_.empty() && restored_ + 1 == coordinators_ && !changing_;
}

void Elastic::expect_recovery(const std::string& after_what, seconds patience) {
  const Deadline deadline = Deadline::after(patience);
  EXPECT_TRUE(eventually(deadline, [&] { return is_settled(); }))
      << "no word of it, or no generation: " << after_what;
  expect_progress(after_what, std::chrono::ceil<seconds>(deadline.left()));
}

void Elastic::expect_steps_redone_at_most(int64_t most) const {
  bool lost = false;
  for (const auto& event : sandbox_.events("run")) {
    if (event.at("kind") == "state_lost") lost = true;
    if (event.at("kind") != "steps_redone") continue;
    const std::string reason = event.at("reason");
    int64_t first = 0;
    int64_t last = 0;
    ASSERT_EQ(std::sscanf(reason.c_str(), "steps %ld to %ld", &first, &last), 2) << reason;
    EXPECT_TRUE(last - first < most || lost) << reason;
    lost = false;
  }
}

std::vector<nlohmann::json> Elastic::events(const std::string& kind) const {
  std::vector<nlohmann::json> found;
  for (const auto& event : sandbox_.events("run")) {
    if (event.at("kind") == kind) found.push_back(event);
  }
  return found;
}

void Elastic::expect_undisturbed() {
  stop();
  const auto losses = sandbox_.losses("run");
  ASSERT_FALSE(losses.empty());
  EXPECT_EQ(sandbox_.metrics("run").rbegin()->first, static_cast<int64_t>(losses.size()))
      << "a step is missing";
  auto fixed = settings_;
  fixed.push_back(fmt::format("train.steps={}", losses.size()));
  // At least fifty steps a second, on a busy machine too.
  const Outcome undisturbed = sandbox_.run(sandbox_.train_arguments("fixed", 2, fixed),
                                           60.0 + static_cast<double>(losses.size()) / 50.0);
  ASSERT_TRUE(undisturbed.status.ok()) << undisturbed.output;
  expect_same_losses(sandbox_.losses("fixed"), losses, "the run that changed");
  const auto expected = sandbox_.samples("fixed");
  const auto samples = sandbox_.samples("run");
  ASSERT_EQ(samples.size(), expected.size());
  for (const auto& [at, line] : expected) {
    EXPECT_EQ(line.at("samples"), samples.at(at).at("samples")) << "step " << at;
  }
}

Child ElasticNodes::start_coordinator(const std::string& listen) {
  std::vector<std::string> arguments = {"coordinator", sandbox_.config(), "--listen", listen};
  for (const auto& setting : coordinator_settings_) {
    arguments.emplace_back("--set");
    arguments.push_back(setting);
  }
  return sandbox_.start(arguments);
}

void ElasticNodes::start_nodes(int nodes, int workers_each, const std::vector<std::string>& more) {
  settings_ = settings(more);
  coordinator_settings_ = settings_;
  coordinator_settings_.push_back("run.dir=" + sandbox_.path("run"));
  coordinator_settings_.push_back(fmt::format("parallel.workers={}", nodes * workers_each));
  run_.emplace(start_coordinator("tcp://127.0.0.1:0"));
  const RunDir run{sandbox_.path("run")};
  ASSERT_TRUE(eventually(Deadline::after(seconds(20)),
                         [&] { return std::filesystem::exists(run.endpoint()); }));
  endpoint_ = read_file(run.endpoint());
  endpoint_.pop_back();
  for (int i = 0; i < nodes; ++i) add_node(workers_each);
  ASSERT_TRUE(reaches_step(3)) << "it does not begin to train";
}

void ElasticNodes::add_node(int workers) {
  nodes_.push_back(
      sandbox_.start({"node", "--coordinator", endpoint_, "--workers", std::to_string(workers)}));
}

void ElasticNodes::replace_coordinator() {
  run_->kill();
  run_.emplace(start_coordinator(endpoint_));
  ++coordinators_;
}

}  // namespace muster
