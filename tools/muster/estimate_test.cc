#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "tools/muster/command.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

std::string output_of(const Arguments& arguments, int expected_code = 0) {
  ::testing::internal::CaptureStdout();
  const int code = run_muster(arguments);
  std::fflush(stdout);
  std::string text = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(code, expected_code) << text;
  return text;
}

nlohmann::json estimate(std::vector<std::string> further) {
  std::vector<std::string> arguments = {
      "estimate", std::string(MUSTER_CONFIGS) + "/llama-3-8b.toml", "--device", "cuda", "--json"};
  arguments.insert(arguments.end(), further.begin(), further.end());
  return nlohmann::json::parse(output_of(arguments));
}

// 8.03 billion parameters: 16 bytes each of weights, moments and gradient sums, shared by two.
TEST(EstimateTest, KnowsALargeModelWithoutAGpu) {
  const auto two = estimate({"--workers", "2"});
  EXPECT_NEAR(two.at("state_bytes").get<double>(), 8.03e9 * 16 / 2, 0.01 * 8.03e9 * 16 / 2);
  EXPECT_EQ(two.at("compute"), "bfloat16");
  EXPECT_GT(two.at("network_bytes").get<int64_t>(), 0);
  const auto four = estimate({"--workers", "4"});
  EXPECT_LT(four.at("state_bytes").get<double>(), 0.51 * two.at("state_bytes").get<double>());
  const auto kept = estimate({"--workers", "4", "--set", "memory.checkpoint=none"});
  const auto dropped = estimate({"--workers", "4", "--set", "memory.checkpoint=block"});
  EXPECT_LT(dropped.at("step_bytes").get<double>(), kept.at("step_bytes").get<double>() / 2);
}

TEST(EstimateTest, PrintsATable) {
  const std::string text = output_of({"estimate", std::string(MUSTER_CONFIGS) + "/gpt2-124m.toml",
                                      "--device", "cpu", "--workers", "1"});
  EXPECT_THAT(text, HasSubstr("each of 1 worker, float32 on CPUs"));
  EXPECT_THAT(text, HasSubstr("in all"));
}

TEST(EstimateTest, BadUsageExitsWithTwo) {
  output_of({"estimate"}, 2);
  output_of({"estimate", std::string(MUSTER_CONFIGS) + "/gpt2-124m.toml", "--device", "tpu"}, 2);
  output_of({"estimate", std::string(MUSTER_CONFIGS) + "/gpt2-124m.toml", "--set", "no.key=1"}, 2);
}

}  // namespace
}  // namespace muster
