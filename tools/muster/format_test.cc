#include "tools/muster/format.h"

#include <gtest/gtest.h>

#include "common/protocol/muster.pb.h"

namespace muster {
namespace {

TEST(FormatTest, Durations) {
  EXPECT_EQ(format_duration(0.04), "0.0 s");
  EXPECT_EQ(format_duration(59.94), "59.9 s");
  EXPECT_EQ(format_duration(59.97), "1 min 0 s");
  EXPECT_EQ(format_duration(185), "3 min 5 s");
  EXPECT_EQ(format_duration(3600 * 50 + 420), "50 h 7 min");
}

TEST(FormatTest, Counts) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999.4), "999");
  EXPECT_EQ(format_count(999.6), "1 k");
  EXPECT_EQ(format_count(12345), "12.3 k");
  EXPECT_EQ(format_count(999499), "999 k");
  EXPECT_EQ(format_count(999600), "1 M");
  EXPECT_EQ(format_count(7.89e9), "7.89 G");
}

TEST(FormatTest, ProgressLineLeavesOutWhatIsUnknown) {
  proto::Status status;
  status.set_total_steps(1500);
  EXPECT_EQ(progress_line(status), "step 0/1500");
  status.set_step(120);
  EXPECT_EQ(progress_line(status), "step 120/1500");
  status.set_loss(3.21449);
  EXPECT_EQ(progress_line(status), "step 120/1500 (8 %), loss 3.2145");
  status.set_has_held_out(true);
  status.set_held_out_loss(3.3);
  status.set_tokens_per_s(12345);
  EXPECT_EQ(progress_line(status),
            "step 120/1500 (8 %), loss 3.2145, held-out 3.3000, 12.3 k tokens/s");
}

TEST(FormatTest, FilesLeftOutWhollyAndInPart) {
  proto::Status status;
  EXPECT_EQ(unused_files(status), "");
  status.set_partly_used_files(2);
  EXPECT_EQ(unused_files(status), "of 2 files some lines were left out");
  status.set_partly_used_files(1);
  status.set_skipped_files(1);
  EXPECT_EQ(unused_files(status),
            "1 file could not be used and was skipped; of 1 file some lines were left out");
  status.set_partly_used_files(0);
  status.set_skipped_files(2);
  EXPECT_EQ(unused_files(status), "2 files could not be used and were skipped");
}

TEST(FormatTest, Bars) {
  EXPECT_EQ(progress_bar(0.0, 4), "[----]");
  EXPECT_EQ(progress_bar(0.5, 4), "[##--]");
  EXPECT_EQ(progress_bar(0.999, 4), "[###-]");
  EXPECT_EQ(progress_bar(1.0, 4), "[####]");
  EXPECT_EQ(progress_bar(7.0, 4), "[####]");
}

TEST(FormatTest, ShellQuoting) {
  EXPECT_EQ(shell_quoted("run.dir=/tmp/a-b_c"), "run.dir=/tmp/a-b_c");
  EXPECT_EQ(shell_quoted("a b"), "'a b'");
  EXPECT_EQ(shell_quoted("it's"), "'it'\\''s'");
  EXPECT_EQ(shell_quoted("run.dir=\"x\""), "'run.dir=\"x\"'");
  EXPECT_EQ(shell_quoted(""), "''");
  EXPECT_EQ(command_line("train", {"a b.toml", "--set", "x.y=1"}),
            "muster train 'a b.toml' --set x.y=1");
}

}  // namespace
}  // namespace muster
