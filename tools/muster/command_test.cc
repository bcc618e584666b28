#include "tools/muster/command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <vector>

#include "common/error.h"
#include "common/files.h"
#include "worker/worker.h"

namespace muster {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

struct Result {
  int code;
  std::string out;
  std::string err;
};

Result run(const Arguments& arguments) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const int code = run_muster(arguments);
  std::fflush(stdout);
  return {code, testing::internal::GetCapturedStdout(), testing::internal::GetCapturedStderr()};
}

TEST(CommandTest, HelpListsEveryCommandAndEachHasItsOwn) {
  const Result help = run({"--help"});
  EXPECT_EQ(help.code, 0);
  for (const Command& command : commands()) {
    EXPECT_THAT(help.out, HasSubstr(std::string("\n  ") + command.name + " "));
    const Result own = run({command.name, "--help"});
    EXPECT_EQ(own.code, 0) << command.name;
    EXPECT_THAT(own.out, StartsWith(std::string("usage: muster ") + command.name));
    EXPECT_EQ(own.err, "");
  }
  EXPECT_THAT(run({"train", "--help"}).out, HasSubstr("[optimizer]"));
}

TEST(CommandTest, BadUsageExitsWithTwo) {
  EXPECT_EQ(run({}).code, 2);
  const Result unknown = run({"trian"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_EQ(
      unknown.err,
      "muster trian: unknown command \"trian\", did you mean \"train\"?; `muster --help` lists "
      "all\n");
  for (const Command& command : commands()) {
    const Result result = run({command.name, "--no-such-option"});
    EXPECT_EQ(result.code, 2) << command.name;
    EXPECT_THAT(result.err, HasSubstr("no-such-option"));
  }
  for (const std::vector<std::string>& wrong :
       {std::vector<std::string>{"--workers", "-1"}, {"--connect-timeout", "nan"}}) {
    std::vector<std::string> words = {"node", "--coordinator", "ipc://@nobody"};
    words.insert(words.end(), wrong.begin(), wrong.end());
    const Result result = run(words);
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.err, HasSubstr(wrong.front()));
  }
  for (const char* needs_argument : {"train", "coordinator", "node", "worker", "data", "status",
                                     "scale", "drain", "stop", "generate"}) {
    const Result result = run({needs_argument});
    EXPECT_EQ(result.code, 2) << needs_argument;
    EXPECT_THAT(result.err, HasSubstr(" is missing")) << needs_argument;
  }
  EXPECT_EQ(run({"train", "x.toml", "--workers", "-1"}).code, 2);
}

TEST(CommandTest, BadConfigsExitWithTwo) {
  const TempDir dir;
  const std::string path = dir.path() + "/x.toml";
  write_file_atomic(path, "[model]\nhedas = 4\n");
  const Result result = run({"train", path});
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.err,
            "muster train: " + path + ":2: model.hedas: unknown key; did you mean model.heads?\n");
  write_file_atomic(path, "");
  EXPECT_EQ(run({"train", path}).err,
            "muster train: " + path +
                ": data.sources: is empty, name the files or folders to train on\n");
  EXPECT_EQ(run({"train", dir.path() + "/none.toml"}).code, 2);
}

TEST(CommandTest, FailuresExitWithOne) {
  const TempDir dir;
  EXPECT_EQ(run({"status", dir.path()}).code, 1);
  EXPECT_EQ(run({"stop", dir.path()}).code, 1);
  EXPECT_EQ(run({"scale", dir.path(), "--workers", "2"}).code, 1);
  EXPECT_EQ(run({"drain", dir.path(), "0"}).code, 1);
}

TEST(CommandTest, DoctorTalksJson) {
  const Result result = run({"doctor", "--json"});
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_THAT(json.at("loopback network").at("verdict"), "ok");
  EXPECT_EQ(result.code, 0) << result.out;
  EXPECT_THAT(run({"doctor"}).out, HasSubstr("CPU cores"));
}

TEST(CommandTest, Version) {
  EXPECT_THAT(run({"--version"}).out, StartsWith("muster "));
}

TEST(ThreadsTest, FarMoreThanCoresAreRefused) {
  EXPECT_NO_THROW(check_threads(0, 2));
  EXPECT_NO_THROW(check_threads(8, 2));
  try {
    check_threads(9, 2);
    ADD_FAILURE() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("parallel.threads: 9 compute threads a worker"));
    EXPECT_THAT(error.what(), testing::HasSubstr("has 2 cores: at most 4 a core"));
  }
}

}  // namespace
}  // namespace muster
