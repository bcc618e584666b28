#include "tools/muster/bench.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/error.h"
#include "tools/muster/command.h"

namespace muster {
namespace {

using testing::HasSubstr;

TEST(BenchTest, MedianLeavesTheWarmUpOut) {
  int calls = 0;
  EXPECT_GE(median_seconds(2, 5, [&] { ++calls; }), 0.0);
  EXPECT_EQ(calls, 7);
}

TEST(BenchTest, NamesAreUniqueAndListed) {
  testing::internal::CaptureStdout();
  EXPECT_EQ(bench_command({"--list"}), 0);
  const std::string output = testing::internal::GetCapturedStdout();
  for (const Benchmark& benchmark : benchmarks()) {
    EXPECT_THAT(output, HasSubstr(std::string(benchmark.name) + " "));
    EXPECT_EQ(output.find(std::string("\n") + benchmark.name + " "),
              output.rfind(std::string("\n") + benchmark.name + " "));
  }
}

TEST(BenchTest, UnknownNamesAreRefused) {
  try {
    bench_command({"contrl"});
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(),
                 "unknown benchmark \"contrl\", did you mean \"control\"?; `muster bench --list` "
                 "lists all");
  }
}

}  // namespace
}  // namespace muster
