#include "tools/muster/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/protocol/muster.pb.h"

namespace muster {
namespace {

using testing::HasSubstr;

TEST(ProgressTest, TimeLeftIsMeasuredFromTheFirstStatus) {
  using std::chrono::seconds;
  const auto start = Deadline::Clock::time_point();
  TimeLeft left;
  EXPECT_EQ(left.estimate(start, 0, 1000), std::nullopt);
  // A resumed run comes in at step 500: what it did before does not count.
  EXPECT_EQ(left.estimate(start + seconds(5), 500, 1000), std::nullopt);
  EXPECT_DOUBLE_EQ(*left.estimate(start + seconds(15), 600, 1000), 40.0);
  // Steps that are done again begin a new measurement.
  EXPECT_EQ(left.estimate(start + seconds(20), 550, 1000), std::nullopt);
  EXPECT_DOUBLE_EQ(*left.estimate(start + seconds(30), 600, 1000), 80.0);
  EXPECT_DOUBLE_EQ(*left.estimate(start + seconds(55), 1000, 1000), 0.0);
}

proto::Status status_at(int64_t step) {
  proto::Status status;
  status.set_phase("training");
  status.set_total_steps(100);
  status.set_step(step);
  status.set_loss(2.5);
  return status;
}

TEST(ProgressTest, LinesOffATerminal) {
  testing::internal::CaptureStdout();
  {
    Progress progress(/*on_terminal=*/false);
    progress.show(status_at(0));
    for (int64_t step = 1; step <= 50; ++step) progress.show(status_at(step));
    proto::Status evaluated = status_at(50);
    evaluated.set_has_held_out(true);
    evaluated.set_held_out_loss(2.75);
    evaluated.set_checkpoint_step(50);
    progress.show(evaluated);
    progress.show(evaluated);
    evaluated.set_phase("finished");
    evaluated.set_finished(true);
    progress.show(evaluated);
  }
  EXPECT_EQ(testing::internal::GetCapturedStdout(),
            "training\n"
            "step 1/100 (1 %), loss 2.5000\n"
            "step 50/100 (50 %), loss 2.5000, held-out 2.7500\n"
            "step 50 is saved\n");
}

TEST(ProgressTest, AResumedRunIsNoSave) {
  testing::internal::CaptureStdout();
  {
    Progress progress(/*on_terminal=*/false);
    proto::Status status = status_at(0);
    status.set_resume_step(30);
    status.set_checkpoint_step(30);
    progress.show(status);
    progress.show(status);
    status.set_checkpoint_step(40);
    progress.show(status);
  }
  EXPECT_EQ(testing::internal::GetCapturedStdout(),
            "training\nresumed from the checkpoint of step 30\nstep 40 is saved\n");
}

TEST(ProgressTest, WhatIsWaitedForIsToldWheneverItChanges) {
  testing::internal::CaptureStdout();
  {
    Progress progress(/*on_terminal=*/false);
    proto::Status status;
    status.set_phase("joining");
    for (const char* reason : {"0 of 2 workers", "0 of 2 workers", "1 of 2 workers"}) {
      status.set_reason(reason);
      progress.show(status);
    }
    status.set_phase("starting");
    status.set_reason("");
    progress.show(status);
  }
  EXPECT_EQ(testing::internal::GetCapturedStdout(),
            "joining: 0 of 2 workers\njoining: 1 of 2 workers\nstarting\n");
}

TEST(ProgressTest, TheNumberOfWorkersIsToldWhenItChanges) {
  const auto status_of = [](uint64_t generation, const std::string& phase, int workers) {
    proto::Status status;
    status.set_phase(phase);
    status.set_generation(generation);
    for (int rank = -1; rank < workers; ++rank) {
      proto::MemberStatus* member = status.add_members();
      member->set_role(proto::ROLE_WORKER);
      member->set_state(rank < 0 ? "standby" : "active");
      member->set_rank(rank);
    }
    return status;
  };
  testing::internal::CaptureStdout();
  {
    Progress progress(/*on_terminal=*/false);
    progress.show(status_of(1, "training", 2));
    // One is lost; the next generation is the answer.
    progress.show(status_of(1, "training", 1));
    progress.show(status_of(2, "starting", 3));
    progress.show(status_of(2, "training", 3));
    progress.show(status_of(3, "training", 3));
    progress.show(status_of(4, "training", 1));
  }
  EXPECT_EQ(testing::internal::GetCapturedStdout(),
            "training\n3 workers from here on, 2 before\n"
            "1 worker from here on, 3 before\n");
}

TEST(ProgressTest, OneBarOnATerminal) {
  testing::internal::CaptureStdout();
  {
    Progress progress(/*on_terminal=*/true);
    progress.show(status_at(25));
    progress.show(status_at(50));
    progress.note("a note");
    progress.show(status_at(75));
  }
  const std::string output = testing::internal::GetCapturedStdout();
  EXPECT_THAT(output, HasSubstr("\r[######------------------] step 25/100"));
  EXPECT_THAT(output, HasSubstr("\r[############------------] step 50/100"));
  EXPECT_THAT(output, HasSubstr("\r\x1b[Ka note\n"));  // the bar makes room
  EXPECT_TRUE(output.ends_with("\n"));
}

}  // namespace
}  // namespace muster
