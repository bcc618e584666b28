#include "tools/muster/run_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/files.h"

namespace muster {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(RunReportTest, OnlyWhatWasAdded) {
  const TempDir dir;
  const std::string old_log = dir.path() + "/old", new_log = dir.path() + "/new";
  write_file_atomic(old_log, "before\n");
  GrowingFiles files;
  files.watch(old_log);
  files.watch(new_log);
  EXPECT_EQ(files.added(old_log), "");
  EXPECT_EQ(files.added(new_log), "");
  write_file_atomic(old_log, "before\nafter\n");
  write_file_atomic(new_log, "first\n");
  EXPECT_EQ(files.added(old_log), "after\n");
  EXPECT_EQ(files.added(new_log), "first\n");
}

TEST(RunReportTest, LastReason) {
  EXPECT_EQ(last_reason(""), "");
  EXPECT_EQ(last_reason("{\"kind\": \"a\", \"reason\": \"one\"}\n"
                        "{\"kind\": \"b\", \"reason\": \"two\"}\n"
                        "{\"kind\": \"c\"}\n{\"kind\": \"cut sho"),
            "two");
  EXPECT_EQ(last_reason("[1]\n7\n\"reason\"\n{\"reason\": 3}\n"), "");
}

TEST(RunReportTest, ErrorsAndWhatTheyQuote) {
  const std::string log =
      "2026-01-31 12:00:00.123 I node started worker 0 (pid 12), log x\n"
      "2026-01-31 12:00:01.123 E node worker 0 (pid 12) was killed by SIGABRT (6)\n"
      "  | rmsnorm.cc:12: CHECK failed: rows > 0\n"
      "2026-01-31 12:00:02.123 I node the run ended: E\n"
      "  | not quoted below an error\n"
      "short\n"
      "2026-01-31 12:00:03.123 E node last\n"
      "muster node: what it died of\n";
  EXPECT_THAT(
      error_lines(log, 10),
      ElementsAre("2026-01-31 12:00:01.123 E node worker 0 (pid 12) was killed by SIGABRT (6)",
                  "  | rmsnorm.cc:12: CHECK failed: rows > 0",
                  "2026-01-31 12:00:03.123 E node last", "muster node: what it died of"));
  EXPECT_THAT(error_lines(log, 1), ElementsAre("muster node: what it died of"));
  EXPECT_THAT(error_lines("", 1), IsEmpty());
}

TEST(RunReportTest, LastMessage) {
  const std::string prefix = "muster coordinator: ";
  EXPECT_EQ(last_message("", prefix), "");
  EXPECT_EQ(last_message("no message of muster coordinator: x\n", prefix), "");
  EXPECT_EQ(last_message(prefix + "first\n", prefix), "first");
  EXPECT_EQ(last_message(prefix + "first\nlog line\n" + prefix + "second\nusage: x\n", prefix),
            "second\nusage: x");
}

TEST(RunReportTest, LastLines) {
  EXPECT_THAT(last_lines("a\nb\nc", 2), ElementsAre("b", "c"));
  EXPECT_THAT(last_lines("a\n", 2), ElementsAre("a"));
}

TEST(RunReport, TellsTroublesAndNothingElse) {
  const std::string events = R"({"kind":"checkpoint","reason":"step 3"})"
                             "\n"
                             R"({"kind":"checkpoint_rejected","reason":"a.safetensors is torn"})"
                             "\nno json\n";
  EXPECT_EQ(troubles(events),
            std::vector<std::string>{"checkpoint rejected: a.safetensors is torn"});
}

TEST(RunReport, TellsHowTheRunChanges) {
  const std::string events =
      R"json({"kind":"member_joined","reason":"worker (pid 4) joined"}
{"kind":"worker_lost","reason":"worker 1 (pid 7 on host a) was killed by SIGKILL (9)"}
{"kind":"worker_lost","reason":"worker 1 (pid 7 on host a) was killed by SIGKILL (9)"}
{"kind":"recovered","reason":"1 worker from step 40 in memory","duration_s":0.4321}
{"kind":"resized","reason":"from 1 to 2 workers"}
)json";
  EXPECT_THAT(
      troubles(events),
      ElementsAre("worker lost: worker 1 (pid 7 on host a) was killed by SIGKILL (9)",
                  "training again: 1 worker from step 40 in memory, after a pause of 0.43 s",
                  "resized: from 1 to 2 workers"));
}

TEST(RunReport, TakesWholeLinesOnce) {
  const TempDir dir;
  const std::string path = dir.path() + "/events.jsonl";
  write_file_atomic(path, "old\n");
  GrowingFiles files;
  files.watch(path);
  EXPECT_EQ(files.take_lines(path), "");
  write_file_atomic(path, "old\none\ntw");
  EXPECT_EQ(files.take_lines(path), "one\n");
  write_file_atomic(path, "old\none\ntwo\n");
  EXPECT_EQ(files.take_lines(path), "two\n");
  EXPECT_EQ(files.take_lines(path), "");
}

}  // namespace
}  // namespace muster
