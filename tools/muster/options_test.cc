#include "tools/muster/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "common/error.h"
#include "common/files.h"

namespace muster {
namespace {

namespace po = boost::program_options;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

Options make_options() {
  Options options("try CONFIG [--count N]", "Tries.");
  options.positional("CONFIG");
  options.add_run_key();
  options.add()("count", po::value<int>()->value_name("N")->default_value(3), "how often")(
      "set", po::value<std::vector<std::string>>()->value_name("KEY=VALUE"), "repeated");
  return options;
}

std::string error_of(const Arguments& arguments) {
  Options options = make_options();
  try {
    options.parse(arguments);
    options.required("CONFIG");
  } catch (const UsageError& error) {
    EXPECT_EQ(error.exit_code(), 2);
    return error.what();
  }
  return "accepted";
}

TEST(OptionsTest, ParsesPositionalsDefaultsAndRepeats) {
  Options options = make_options();
  ASSERT_TRUE(options.parse({"--set", "a.b=1", "demo.toml", "--set=c.d=-2"}));
  EXPECT_EQ(options.required("CONFIG"), "demo.toml");
  EXPECT_EQ(options.get<int>("count"), 3);
  EXPECT_THAT(options.all("set"), ElementsAre("a.b=1", "c.d=-2"));
  Options none = make_options();
  ASSERT_TRUE(none.parse({}));
  EXPECT_THAT(none.all("set"), IsEmpty());
}

TEST(OptionsTest, HelpShowsDefaults) {
  testing::internal::CaptureStdout();
  Options options = make_options();
  options.add_epilogue("more\n");
  EXPECT_FALSE(options.parse({"--help"}));
  const std::string output = testing::internal::GetCapturedStdout();
  EXPECT_THAT(output, StartsWith("usage: muster try CONFIG [--count N]\n\nTries.\n"));
  EXPECT_THAT(output, HasSubstr("--count N (=3)"));
  EXPECT_THAT(output, testing::EndsWith("\nmore\n"));
  EXPECT_THAT(output, testing::Not(HasSubstr("--CONFIG")));
}

TEST(OptionsTest, NamesBadUsage) {
  EXPECT_THAT(error_of({}), StartsWith("CONFIG is missing\nusage: muster try CONFIG"));
  EXPECT_THAT(error_of({}), testing::EndsWith("`muster try --help` says more"));
  EXPECT_THAT(error_of({"x", "--bogus"}), HasSubstr("--bogus"));
  EXPECT_THAT(error_of({"x", "--count", "many"}), HasSubstr("--count"));
  EXPECT_THAT(error_of({"x", "--coun", "3"}), HasSubstr("--coun"));  // no guessing
  EXPECT_THAT(error_of({"x", "y"}), HasSubstr("usage: muster try"));
}

TEST(OptionsTest, TheRunKeyComesFromFileOrEnvironment) {
  Options options = make_options();
  ASSERT_TRUE(options.parse({"x"}));
  ::unsetenv("MUSTER_RUN_KEY");
  EXPECT_FALSE(options.security().enabled());
  const std::string key = generate_run_key(), other = generate_run_key();
  ::setenv("MUSTER_RUN_KEY", key.c_str(), 1);
  EXPECT_EQ(options.security().run_key, key);
  const TempDir dir;
  const std::string path = dir.path() + "/run.key";
  write_file_atomic(path, other);
  std::filesystem::permissions(path, std::filesystem::perms::owner_read);
  Options with_file = make_options();
  ASSERT_TRUE(with_file.parse({"x", "--run-key", path}));
  EXPECT_EQ(with_file.security().run_key, other);
  ::unsetenv("MUSTER_RUN_KEY");
}

}  // namespace
}  // namespace muster
