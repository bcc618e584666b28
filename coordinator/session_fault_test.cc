// How a session tells faults: which of many words about one failure counts, and what is only noise.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "common/files.h"
#include "coordinator/session_testing.h"

namespace muster {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST_F(SessionTest, AKilledWorkerIsNamedWithTheWayToResume) {
  config_.checkpoint.every = 2;
  train();
  commit(1, 2);
  save(0, 2);
  save(1, 2);
  commit(3, 3);
  // The survivor's broken collective comes first; the cause is what is told.
  proto::Envelope failed;
  failed.mutable_worker_failed()->set_error("Connection reset by peer");
  say("w0", failed);
  EXPECT_FALSE(session_->outcome());
  killed("w1", proto::ROLE_WORKER, -1.0);
  ASSERT_TRUE(session_->outcome());
  EXPECT_FALSE(session_->outcome()->ok);
  const std::string reason = stop_reason("w0");
  EXPECT_THAT(reason, HasSubstr("worker 1 (pid 1049 on host h) was killed by SIGKILL"));
  EXPECT_THAT(reason, HasSubstr("at step 3; resume from step 2 with: muster train "));
  EXPECT_THAT(reason, Not(HasSubstr("Connection reset")));
  EXPECT_THAT(read_file(RunDir{dir_.path()}.events()), HasSubstr("\"kind\":\"fault\""));
}

TEST_F(SessionTest, AFailureIsTakenAtItsWordAfterAMoment) {
  train();
  proto::Envelope failed;
  failed.mutable_worker_failed()->set_error("the loss is not finite");
  say("w0", failed);
  proto::Envelope collateral;
  collateral.mutable_worker_failed()->set_error("Connection reset by peer");
  say("w1", collateral);
  now_ += 1.1;
  tick();
  ASSERT_TRUE(session_->outcome());
  EXPECT_THAT(session_->outcome()->reason,
              HasSubstr("worker 0 (pid 1048 on host h) failed: the loss is not finite at step 0"));
}

TEST_F(SessionTest, AFailureOfAWorkersOwnExplainsThoseOfItsPeers) {
  train();
  proto::Envelope collateral;
  collateral.mutable_worker_failed()->set_error("worker 1 left");
  collateral.mutable_worker_failed()->set_peer(true);
  say("w0", collateral);
  proto::Envelope failed;
  failed.mutable_worker_failed()->set_error("the loss is not finite");
  say("w1", failed);
  now_ += 1.1;
  tick();
  ASSERT_TRUE(session_->outcome());
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("failed: the loss is not finite"));
}

TEST_F(SessionTest, AWorkersOwnWordsBeatItsExitStatus) {
  train();
  proto::Envelope failed;
  failed.mutable_worker_failed()->set_error("out of memory");
  say("w1", failed);
  proto::Envelope exited;
  exited.mutable_process_exited()->set_member_id("id-w1");
  exited.mutable_process_exited()->set_code(1);
  exited.mutable_process_exited()->set_restart_in_s(-1);
  say("agent", exited);
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("failed: out of memory"));
}

TEST_F(SessionTest, AProcessThatDiesBeforeItsHelloIsNamed) {
  start();
  hello("agent", proto::ROLE_NODE, 2);
  proto::Envelope exited;
  exited.mutable_process_exited()->set_member_id("never-came");
  exited.mutable_process_exited()->set_role(proto::ROLE_DATA);
  exited.mutable_process_exited()->set_pid(77);
  exited.mutable_process_exited()->set_host("h");
  exited.mutable_process_exited()->set_code(1);
  exited.mutable_process_exited()->set_restart_in_s(-1);
  say("agent", exited);
  EXPECT_THAT(session_->outcome()->reason,
              HasSubstr("a data service (pid 77 on host h) exited with status 1"));
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("logs"));
}

TEST_F(SessionTest, ABrokenConnectionIsForgivenOnlyIfItComesBack) {
  train();
  closed_.insert("data");
  now_ += 1.0;
  tick();
  EXPECT_FALSE(session_->outcome());
  closed_.clear();
  now_ += 0.5;
  beat({"agent", "data", "w0", "w1"});
  tick();
  now_ += 0.6;
  tick();
  EXPECT_FALSE(session_->outcome());

  closed_ = {"w0", "agent"};  // a whole node, as seen by the next heartbeats
  beat({"data", "w1"});
  now_ += 1.0;
  tick();
  now_ += 1.1;
  tick();
  ASSERT_TRUE(session_->outcome());
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("node agent (pid"));
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("its connection closed"));
}

TEST_F(SessionTest, SilenceEndsTheRun) {
  train();
  for (int i = 0; i < 7 && !session_->outcome(); ++i) {
    now_ += 1;
    beat({"agent", "data", "w0"});
    tick();
  }
  ASSERT_TRUE(session_->outcome());
  EXPECT_THAT(session_->outcome()->reason,
              HasSubstr("worker 1 (pid 1049 on host h) has been silent"));
  const auto stops = take("agent", proto::Envelope::kStop);
  ASSERT_EQ(stops.size(), 1u);
  EXPECT_THAT(stops[0].stop().silent(), testing::ElementsAre("id-w1"));
  closed_ = {"agent", "data", "w0"};
  now_ += 0.1;
  tick();
  EXPECT_TRUE(session_->over()) << "a silent member is not waited for";
}

TEST_F(SessionTest, MissingMembersAreNamedAtTheJoinTimeout) {
  start();
  hello("agent", proto::ROLE_NODE, 2);
  EXPECT_THAT(session_->status(now_).reason(), HasSubstr("0 of 2 workers have joined (h: 0 of 2)"));
  for (int i = 0; i < 25 && !session_->outcome(); ++i) {
    now_ += 1;
    beat({"agent"});
    tick();
  }
  ASSERT_TRUE(session_->outcome());
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("0 of 2 workers have joined"));
}

TEST_F(SessionTest, WorkersThatNeverGetReadyAreNamed) {
  assemble();
  ready("w0");
  for (int i = 0; i < 25 && !session_->outcome(); ++i) {
    now_ += 1;
    beat({"agent", "data", "w0", "w1"});
    tick();
  }
  ASSERT_TRUE(session_->outcome());
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("not ready within"));
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("worker 1 (pid"));
  EXPECT_THAT(session_->outcome()->reason, Not(HasSubstr("worker 0")));
}

TEST_F(SessionTest, DataThatCannotBeUsedIsSaid) {
  start();
  hello("agent", proto::ROLE_NODE, 2);
  hello("data", proto::ROLE_DATA);
  proto::Envelope envelope;
  envelope.mutable_dataset_report()->set_error("/corpus: no such file or folder (data.sources)");
  say("data", envelope);
  ASSERT_TRUE(session_->outcome());
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("/corpus: no such file"));
}

TEST_F(SessionTest, DataThatBreaksLaterEndsTheRun) {
  train();
  proto::Envelope envelope;
  envelope.mutable_dataset_report()->set_error("/corpus/a.txt: changed on disk");
  say("data", envelope);
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("/corpus/a.txt: changed on disk"));
}

TEST_F(SessionTest, StrangersAndNonsenseAreHarmless) {
  train();
  proto::Envelope report;
  report.mutable_step_report()->set_rank(0);
  say("stranger", report);
  EXPECT_THAT(take("stranger", proto::Envelope::kRefused).at(0).refused().reason(),
              HasSubstr("hello"));
  hello("odd", proto::ROLE_UNKNOWN);
  EXPECT_EQ(take("odd", proto::Envelope::kRefused).size(), 1u);
  // Everything a worker could say, said out of turn by every kind of member.
  for (const char* peer : {"agent", "data", "w0", "w1"}) {
    for (int field = 10; field < 60; ++field) {
      const auto* descriptor = proto::Envelope::descriptor()->FindFieldByNumber(field);
      if (descriptor == nullptr || field == proto::Envelope::kHelloFieldNumber ||
          field == proto::Envelope::kLeavingFieldNumber ||
          field == proto::Envelope::kStopRequestFieldNumber ||
          field == proto::Envelope::kProcessExitedFieldNumber ||
          field == proto::Envelope::kWorkerFailedFieldNumber) {
        continue;
      }
      proto::Envelope envelope;
      envelope.GetReflection()->MutableMessage(&envelope, descriptor);
      say(peer, envelope);
    }
  }
  EXPECT_FALSE(session_->outcome());
  commit(1, 1);
  EXPECT_EQ(session_->status(now_).step(), 1);
}

}  // namespace
}  // namespace muster
