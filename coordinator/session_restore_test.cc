// A coordinator that goes on for one that was killed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/files.h"
#include "coordinator/change_testing.h"

namespace muster {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Another coordinator in the place of one that was killed.
class RestoreTest : public ChangeTest {
 protected:
  // The killed one's members do not know yet.
  void restart() {
    start();
    ASSERT_TRUE(session_->restore(now_));
    sent_.clear();
  }
  void say_hello_again() {
    hello("agent", proto::ROLE_NODE, 2);
    hello("data", proto::ROLE_DATA);
    hello("w0", proto::ROLE_WORKER);
    hello("w1", proto::ROLE_WORKER);
  }
};

TEST_F(RestoreTest, GoesOnWithTheMembersAndReportsThatTheyRepeat) {
  train();
  commit(1, 2);
  restart();
  EXPECT_EQ(session_->status(now_).step(), 2);
  EXPECT_EQ(session_->status(now_).tokens(), 2 * 64);
  proto::Envelope heartbeat;
  heartbeat.mutable_heartbeat();
  say("w0", heartbeat);
  EXPECT_EQ(take("w0", proto::Envelope::kHelloAgain).size(), 1u);
  say_hello_again();
  EXPECT_EQ(take("w1", proto::Envelope::kWelcome).size(), 1u);
  EXPECT_EQ(take("w1", proto::Envelope::kHalt).size(), 1u);
  // Trained while no coordinator was there.
  for (int64_t step = 3; step <= 4; ++step) {
    report_from("w0", 1, 0, step);
    report_from("w1", 1, 1, step);
  }
  halted("w0", {piece(1, 2, 0, 4)});
  halted("w1", {piece(1, 2, 1, 4)});
  EXPECT_EQ(assignment("w0").generation(), 2u);
  EXPECT_EQ(assignment("w0").generation(), 0u) << "once";
  ready("w0");
  ready("w1");
  EXPECT_EQ(planned("w1").at(0).step(), 5);
  EXPECT_EQ(session_->status(now_).tokens(), 4 * 64);
  EXPECT_EQ(session_->status(now_).redone_steps(), 0);
}

TEST_F(RestoreTest, WhoDoesNotComeBackIsLost) {
  train();
  commit(1, 2);
  restart();
  hello("agent", proto::ROLE_NODE, 2);
  hello("data", proto::ROLE_DATA);
  hello("w0", proto::ROLE_WORKER);
  halted("w0", {piece(1, 2, 0, 2), piece(1, 2, 1, 2)});
  for (int i = 0; i < 7; ++i) {
    now_ += 1;
    beat({"agent", "data", "w0"});
    tick();
  }
  EXPECT_EQ(assignment("w0").world_size(), 1);
  EXPECT_FALSE(session_->outcome());
}

TEST_F(RestoreTest, WhoWasGivenUpBeforeLeavesTheGenerationItIsStillIn) {
  train();
  commit(1, 2);
  restart();
  say_hello_again();
  hello("w9", proto::ROLE_WORKER);
  EXPECT_EQ(take("w9", proto::Envelope::kHalt).at(0).halt().generation(), 1u);
  halted("w0", {piece(1, 2, 0, 2)});
  halted("w1", {piece(1, 2, 1, 2)});
  EXPECT_EQ(assignment("w9").generation(), 2u);
}

TEST_F(RestoreTest, AnExitIsAnEventOnce) {
  train();
  commit(1, 2);
  restart();
  say_hello_again();
  proto::Envelope exited;
  exited.mutable_process_exited()->set_member_id("never heard of");
  exited.mutable_process_exited()->set_restart_in_s(0.1);
  exited.mutable_process_exited()->set_pid(77);
  exited.mutable_process_exited()->set_told(true);
  say("agent", exited);
  EXPECT_EQ(events().find("(pid 77 "), std::string::npos);
  exited.mutable_process_exited()->set_told(false);
  say("agent", exited);
  EXPECT_NE(events().find("(pid 77 "), std::string::npos);
}

TEST_F(RestoreTest, WithNobodyLeftTheRunStartsAsAnyOther) {
  config_.checkpoint.every = 2;
  train();
  commit(1, 2);
  save(0, 2);
  save(1, 2);
  restart();
  for (int i = 0; i < 7; ++i) {
    now_ += 1;
    tick();
  }
  EXPECT_FALSE(session_->outcome());
  hello("agent2", proto::ROLE_NODE, 2, "id-agent2");
  hello("data2", proto::ROLE_DATA, 0, "id-agent2");
  hello("w2", proto::ROLE_WORKER, 0, "id-agent2");
  say("data2", dataset());
  EXPECT_TRUE(take("w2", proto::Envelope::kAssignment).empty()) << "two are expected";
  hello("w3", proto::ROLE_WORKER, 0, "id-agent2");
  EXPECT_EQ(assignment("w3").resume_step(), 2);
  EXPECT_EQ(assignment("w2").world_size(), 2);
}

TEST_F(RestoreTest, WhoComesBackAfterTheEndIsToldSo) {
  train();
  commit(1, 2);
  restart();
  session_->request_stop("enough", /*immediately=*/true, now_);
  EXPECT_FALSE(session_->over());
  hello("agent", proto::ROLE_NODE, 2);
  EXPECT_EQ(stop_reason("agent"),
            "stopped at once, after step 2: enough; there is no checkpoint yet, "
            "start again with: muster train " +
                RunDir{dir_.path()}.config());
}

TEST_F(RestoreTest, ARunThatEndedLeavesNothingToGoOnWith) {
  train();
  session_->request_stop("enough", true, now_);
  everybody_leaves();
  start();
  EXPECT_FALSE(session_->restore(now_));
}

}  // namespace
}  // namespace muster
