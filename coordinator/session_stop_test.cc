// How a session ends on request, and who is told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/files.h"
#include "coordinator/session_testing.h"

namespace muster {
namespace {

using testing::HasSubstr;

TEST_F(SessionTest, AStopRequestSavesAtTheNextUnplannedStep) {
  train();
  commit(1, 2);  // steps up to 6 are handed out
  planned("w0");
  proto::Envelope request;
  request.set_request_id(9);
  request.mutable_stop_request()->set_reason("enough");
  say("observer", request);
  EXPECT_EQ(take("observer", proto::Envelope::kAccepted).at(0).request_id(), 9u);
  const auto steps = planned("w0");
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_EQ(steps[0].step(), 7);
  EXPECT_TRUE(steps[0].save() && steps[0].last());
  EXPECT_EQ(session_->status(now_).phase(), "stopping");
  commit(3, 7);
  save(0, 7);
  save(1, 7);
  ASSERT_TRUE(session_->outcome());
  EXPECT_TRUE(session_->outcome()->ok);
  EXPECT_EQ(session_->outcome()->reason, "stopped at step 7 of 10, saved: enough");
}

TEST_F(SessionTest, AMemberThatWasAskedToGoStopsTheRun) {
  train();
  proto::Envelope leaving;
  leaving.mutable_leaving()->set_reason("SIGTERM");
  say("w1", leaving);
  EXPECT_EQ(session_->phase(), Phase::kStopping);
  EXPECT_EQ(planned("w1").back().step(), 5);
  commit(1, 5);
  save(0, 5);
  save(1, 5);
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("worker 1 (pid"));
}

TEST_F(SessionTest, StoppingAtOnceIsNotOk) {
  train();
  session_->request_stop("second signal", true, now_);
  ASSERT_TRUE(session_->outcome());
  EXPECT_FALSE(session_->outcome()->ok);
  EXPECT_THAT(stop_reason("w0"), HasSubstr("stopped at once, after step 0: second signal"));
}

TEST_F(SessionTest, AnAbandonedRunEndsWithTheReasonAlone) {
  train();
  session_->abandon("the run directory was removed", now_);
  ASSERT_TRUE(session_->outcome());
  EXPECT_FALSE(session_->outcome()->ok);
  EXPECT_EQ(stop_reason("w0"), "the run directory was removed");
}

TEST_F(SessionTest, AStopBeforeTheFirstStepIsFine) {
  start();
  session_->request_stop("changed my mind", false, now_);
  EXPECT_TRUE(session_->outcome()->ok);
  everybody_leaves();
  EXPECT_TRUE(session_->over());
}

TEST_F(SessionTest, TheHintToResumeIsTheCommandThatStartedTheRun) {
  resume_command_ = "muster coordinator a.toml --listen 'tcp://*:29400'";
  train();
  session_->request_stop("second signal", true, now_);
  EXPECT_THAT(session_->outcome()->reason,
              HasSubstr("there is no checkpoint yet, start again with: " + resume_command_));
}

TEST_F(SessionTest, ObserversGetTheLastWord) {
  train();
  proto::Envelope request;
  request.mutable_status_request();
  say("observer", request);
  EXPECT_FALSE(take("observer", proto::Envelope::kStatus).at(0).status().finished());
  session_->request_stop("enough", true, now_);
  everybody_leaves();
  EXPECT_FALSE(session_->over()) << "the observer has not been told";
  say("observer", request);
  const auto status = take("observer", proto::Envelope::kStatus).at(0).status();
  EXPECT_TRUE(status.finished());
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.phase(), "failed");
  EXPECT_THAT(status.reason(), HasSubstr("enough"));
  EXPECT_TRUE(session_->over());
}

TEST_F(SessionTest, WhoDoesNotLeaveIsNotWaitedForForEver) {
  train();
  session_->request_stop("enough", true, now_);
  now_ += 4.9;
  tick();
  EXPECT_FALSE(session_->over());
  now_ += 0.2;
  tick();
  EXPECT_TRUE(session_->over());
  EXPECT_THAT(read_file(RunDir{dir_.path()}.events()), HasSubstr("did not leave within 5 s"));
}

}  // namespace
}  // namespace muster
