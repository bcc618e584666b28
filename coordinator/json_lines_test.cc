#include "coordinator/json_lines.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "common/error.h"

namespace muster {
namespace {

class JsonLinesTest : public testing::Test {
 protected:
  JsonLinesTest() : path_(dir_.path() + "/lines.jsonl") {}
  TempDir dir_;
  std::string path_;
};

TEST_F(JsonLinesTest, Appends) {
  { JsonLines(path_).append({{"step", 1}}); }
  { JsonLines(path_).append({{"step", 2}, {"text", "a\nb"}}); }
  EXPECT_EQ(read_file(path_), "{\"step\":1}\n{\"step\":2,\"text\":\"a\\nb\"}\n");
}

TEST_F(JsonLinesTest, CutsOffAHalfWrittenLine) {
  std::ofstream(path_) << "{\"step\":1}\n{\"ste";
  JsonLines(path_).append({{"step", 2}});
  EXPECT_EQ(read_file(path_), "{\"step\":1}\n{\"step\":2}\n");
}

TEST_F(JsonLinesTest, ReadsWholeLines) {
  EXPECT_TRUE(read_json_lines(path_).empty());
  std::ofstream(path_) << "{\"step\":1}\n{\"step\":2}\n{\"ste";
  const auto objects = read_json_lines(path_);
  ASSERT_EQ(objects.size(), 2U);
  EXPECT_EQ(objects[1].at("step"), 2);
}

TEST_F(JsonLinesTest, NamesALineThatIsNoObject) {
  for (const char* wrong : {"{\"step\":", "", "2"}) {
    std::ofstream(path_) << "{\"step\":1}\n" << wrong << "\n";
    try {
      read_json_lines(path_);
      ADD_FAILURE() << "read '" << wrong << "'";
    } catch (const DataError& e) {
      EXPECT_THAT(e.what(), testing::HasSubstr(path_ + ":2"));
    }
  }
}

TEST_F(JsonLinesTest, SurvivesTextThatIsNotUtf8) {
  JsonLines(path_).append({{"reason", "bad \xff byte"}});
  EXPECT_THAT(read_file(path_), testing::StartsWith("{\"reason\":\"bad "));
}

TEST_F(JsonLinesTest, AFullDiskLosesLinesOnly) {
  JsonLines full("/dev/full");
  full.append({{"step", 1}});
  full.append({{"step", 2}});
}

TEST_F(JsonLinesTest, NamesWhatItCannotOpen) {
  try {
    JsonLines lines(dir_.path() + "/none/x.jsonl");
    FAIL();
  } catch (const IoError& e) {
    EXPECT_THAT(e.what(), testing::HasSubstr("/none/x.jsonl"));
  }
}

TEST_F(JsonLinesTest, ForgetsTheStepsThatAreRedone) {
  {
    JsonLines lines(path_);
    for (int step = 1; step <= 5; ++step) lines.append({{"step", step}});
  }
  forget_steps_after(path_, 3);
  EXPECT_EQ(read_file(path_), "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n");
  forget_steps_after(path_, 3);
  forget_steps_after(dir_.path() + "/none", 3);
  forget_steps_after(path_, 0);
  EXPECT_EQ(read_file(path_), "");
}

TEST(TimestampTest, IsIso8601) {
  EXPECT_THAT(
      timestamp(),
      testing::MatchesRegex("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\\.[0-9]{3}Z"));
}

}  // namespace
}  // namespace muster
