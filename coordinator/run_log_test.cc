#include "coordinator/run_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "coordinator/json_lines.h"

namespace muster {
namespace {

using Json = nlohmann::json;

class RunLogTest : public testing::Test {
 protected:
  TempDir dir_;
  RunDir run_{dir_.path()};
};

StepMetrics metrics(int64_t step) {
  StepMetrics m;
  m.step = step;
  m.tokens = 100;
  m.loss = 2.5;
  m.step_s = 0.5;
  m.world = 2;
  m.generation = 1;
  return m;
}

TEST_F(RunLogTest, AStepIsOneLineOfMetrics) {
  RunLog log(run_, false);
  log.begin_generation(1, 0, "start", {});
  log.step(metrics(1), {});
  StepMetrics second = metrics(2);
  second.loss = std::numeric_limits<double>::quiet_NaN();
  second.has_held_out = true;
  second.held_out_loss = 3.5;
  log.step(second, {});
  const auto lines = read_json_lines(run_.metrics());
  ASSERT_EQ(lines.size(), 2u);
  for (const char* key : {"step", "tokens", "loss", "grad_norm", "lr", "tokens_per_s", "step_s",
                          "data_wait_s", "comm_wait_s", "mem_bytes", "world", "generation"}) {
    EXPECT_TRUE(lines[0].contains(key)) << key;
  }
  EXPECT_EQ(lines[0].at("tokens_per_s"), 200.0);
  EXPECT_FALSE(lines[0].contains("held_out_loss"));
  EXPECT_TRUE(lines[1].at("loss").is_null());
  EXPECT_EQ(lines[1].at("held_out_loss"), 3.5);
  EXPECT_FALSE(std::filesystem::exists(run_.samples()));
}

TEST_F(RunLogTest, SamplesOfAllRanksAreSorted) {
  RunLog log(run_, true);
  log.begin_generation(1, 0, "start", {});
  log.step(metrics(1), {{7, 0xab}, {3, 0xcd}});
  const auto lines = read_json_lines(run_.samples());
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].at("samples"), Json({3, 7}));
  EXPECT_EQ(lines[0].at("hashes"), Json({"00000000000000cd", "00000000000000ab"}));
}

TEST_F(RunLogTest, AResumedRunHasEachStepOnce) {
  {
    RunLog log(run_, true);
    log.begin_generation(1, 0, "start", {});
    for (int64_t step = 1; step <= 5; ++step) log.step(metrics(step), {{step, 1}});
  }
  RunLog log(run_, true);
  EXPECT_EQ(log.last_generation(), 1u);
  log.begin_generation(2, 3, "resume", {});
  log.step(metrics(4), {{4, 1}});
  for (const std::string& path : {run_.metrics(), run_.samples()}) {
    const auto lines = read_json_lines(path);
    ASSERT_EQ(lines.size(), 4u) << path;
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(lines[i].at("step"), i + 1);
  }
}

TEST_F(RunLogTest, EventsHaveTimeKindReasonAndDuration) {
  RunLog log(run_, false);
  log.event(
      {.kind = "fault", .reason = "worker 1 left", .duration_s = 1.5, .step = 3, .generation = 1});
  const auto lines = read_json_lines(run_.events());
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].at("kind"), "fault");
  EXPECT_EQ(lines[0].at("reason"), "worker 1 left");
  EXPECT_EQ(lines[0].at("duration_s"), 1.5);
  EXPECT_THAT(lines[0].at("time").get<std::string>(), testing::EndsWith("Z"));
}

}  // namespace
}  // namespace muster
