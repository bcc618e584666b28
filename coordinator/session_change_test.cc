// How a session changes generations while it trains: growth, leave, crash, and waiting for workers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/files.h"
#include "coordinator/change_testing.h"

namespace muster {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

TEST_F(ChangeTest, AJoinerIsTakenInAtTheLastPlannedStep) {
  train();
  commit(1, 2);  // up to step 6 is handed out
  planned("w0");
  hello("w2", proto::ROLE_WORKER);
  const proto::Assignment newcomer = assignment("w2");
  EXPECT_EQ(newcomer.generation(), 2u);
  EXPECT_EQ(ranks_["w2"], 2);
  EXPECT_EQ(newcomer.world_size(), 3);
  EXPECT_EQ(take("w2", proto::Envelope::kGoOver).at(0).go_over().resume_step(), 6);
  EXPECT_EQ(newcomer.checkpoint_path(), "");
  EXPECT_EQ(muster::place_of("id-w2", newcomer).data_endpoint, "ipc://@data");
  EXPECT_EQ(newcomer.handover().generation(), 1u);
  EXPECT_THAT(holders(newcomer), ElementsAre("id-w0", "id-w1"));
  EXPECT_THAT(members(newcomer), ElementsAre("id-w0", "id-w1", "id-w2"));
  EXPECT_EQ(ranks_["w1"], 1);

  // The others finish what they were handed out, and nothing else.
  for (int64_t step = 3; step <= 6; ++step) {
    report_from("w0", 1, 0, step);
    report_from("w1", 1, 1, step);
  }
  EXPECT_TRUE(planned("w0").empty());
  for (const char* peer : {"w0", "w1", "w2"}) ready(peer);
  EXPECT_EQ(session_->phase(), Phase::kTraining);
  const auto steps = planned("w2");
  ASSERT_FALSE(steps.empty());
  EXPECT_EQ(steps[0].step(), 7);
  EXPECT_TRUE(steps[0].mirror()) << "the new layout has no mirrors yet";
  EXPECT_EQ(steps[0].samples_size(), 1);
  for (int rank = 0; rank < 3; ++rank) report_from("w" + std::to_string(rank), 2, rank, 7);
  EXPECT_EQ(session_->status(now_).step(), 7);
  EXPECT_EQ(session_->status(now_).tokens(), 7 * 64);
}

TEST_F(ChangeTest, NothingIsMirroredBeforeEveryWorkerHasTheMemoryForIt) {
  without_memory_ = {"w0", "w1"};
  train();
  commit(1, 1);
  without_memory_ = {"w1"};
  commit(2, 2);
  for (const auto& step : planned("w0")) EXPECT_FALSE(step.mirror()) << step.step();
  EXPECT_THAT(events(), Not(HasSubstr("mirroring")));
  without_memory_.clear();
  commit(3, 3);  // up to step 6 was handed out
  const auto steps = planned("w0");
  ASSERT_FALSE(steps.empty());
  EXPECT_EQ(steps[0].step(), 7);
  EXPECT_TRUE(steps[0].mirror());
  EXPECT_THAT(events(), HasSubstr("the state is kept twice from step 6 on"));
  commit(4, 5);
  const std::string all = events();
  EXPECT_EQ(all.find("mirroring"), all.rfind("mirroring")) << "it is said once";

  // A generation whose workers have it all mirrors from its first step on, as ever.
  hello("w2", proto::ROLE_WORKER);
  for (int64_t step = 6; step <= 9; ++step) {
    report_from("w0", 1, 0, step);
    report_from("w1", 1, 1, step);
  }
  planned("w0");
  for (const char* peer : {"w0", "w1", "w2"}) ready(peer);
  const auto first = planned("w0");
  ASSERT_FALSE(first.empty());
  EXPECT_TRUE(first[0].mirror());
}

TEST_F(ChangeTest, OneWorkerWithoutMemoryKeepsAllFromMirroring) {
  without_memory_ = {"w1"};
  train();
  commit(1, 20);
  for (const auto& step : planned("w0")) EXPECT_FALSE(step.mirror()) << step.step();
  EXPECT_THAT(events(), Not(HasSubstr("mirroring")));
  killed("w1");
  halted("w0", {});  // it began from the seed: no generation before has left anything
  EXPECT_EQ(assignment("w0").resume_step(), 0);
  EXPECT_THAT(events(), HasSubstr("state_lost"));
}

TEST_F(ChangeTest, TrainingWaitsForTheLastReportOfTheOldGeneration) {
  train();
  hello("w2", proto::ROLE_WORKER);
  for (int64_t step = 1; step <= 4; ++step) report_from("w0", 1, 0, step);
  for (const char* peer : {"w0", "w1", "w2"}) ready(peer);
  EXPECT_EQ(session_->phase(), Phase::kStarting);
  for (int64_t step = 1; step <= 4; ++step) report_from("w1", 1, 1, step);
  EXPECT_EQ(session_->phase(), Phase::kTraining);
  EXPECT_EQ(session_->status(now_).step(), 4);
}

TEST_F(ChangeTest, SurvivorsGoOnFromMemoryAfterACrash) {
  train();
  commit(1, 2);
  killed("w1");
  EXPECT_EQ(session_->phase(), Phase::kHalting);
  EXPECT_EQ(take("w0", proto::Envelope::kHalt).at(0).halt().generation(), 1u);
  EXPECT_TRUE(take("w1", proto::Envelope::kHalt).empty());
  halted("w0", {piece(1, 2, 0, 2), piece(1, 2, 1, 2), piece(1, 2, 0, 3)});
  const proto::Assignment next = assignment("w0");
  EXPECT_EQ(next.generation(), 2u);
  EXPECT_EQ(next.world_size(), 1);
  EXPECT_EQ(next.resume_step(), 2);
  EXPECT_THAT(holders(next), ElementsAre("id-w0", "id-w0"));
  ready("w0");
  const auto steps = planned("w0");
  EXPECT_EQ(steps.back().samples_size(), 4);
  EXPECT_FALSE(steps.back().mirror()) << "nobody is there to mirror";
  EXPECT_THAT(events(), HasSubstr("worker 1 (pid 1049 on host h) was killed by SIGKILL"));
  EXPECT_EQ(session_->status(now_).redone_steps(), 0);
}

TEST_F(ChangeTest, ACommittedStepWhoseStateIsGoneIsDoneAgain) {
  train();
  commit(1, 3);
  killed("w1");
  halted("w0", {piece(1, 2, 0, 2), piece(1, 2, 1, 2), piece(1, 2, 0, 3)});
  EXPECT_EQ(assignment("w0").resume_step(), 2);
  EXPECT_EQ(session_->status(now_).redone_steps(), 1);
  ready("w0");
  report_from("w0", 2, 0, 3);
  EXPECT_EQ(session_->status(now_).tokens(), 3 * 64);
  const std::string metrics = read_file(RunDir{dir_.path()}.metrics());
  EXPECT_EQ(std::count(metrics.begin(), metrics.end(), '\n'), 3);
}

TEST_F(ChangeTest, AStepCountsByTheSurvivorsReportsWhereItsStateIsWhole) {
  train();
  commit(1, 2);
  report(0, 3);  // worker 1 is killed with its report on the way
  killed("w1");
  halted("w0", {piece(1, 2, 0, 3), piece(1, 2, 1, 3)});
  EXPECT_EQ(assignment("w0").resume_step(), 3);
  EXPECT_EQ(session_->status(now_).step(), 3);
}

TEST_F(ChangeTest, WithoutAllPartsTheNewestCheckpointServes) {
  config_.checkpoint.every = 2;
  train();
  commit(1, 2);
  save(0, 2);
  save(1, 2);
  commit(3, 3);
  killed("w1");
  halted("w0", {piece(1, 2, 0, 3)});
  const proto::Assignment next = assignment("w0");
  EXPECT_FALSE(next.has_handover());
  EXPECT_EQ(next.resume_step(), 2);
  EXPECT_THAT(next.checkpoint_path(), HasSubstr("step-00000002"));
  EXPECT_THAT(events(), HasSubstr("state_lost"));
}

TEST_F(ChangeTest, ABrokenCollectiveAloneIsAnotherTryOfAll) {
  train();
  commit(1, 1);
  lost_peer("w0", 1);
  EXPECT_EQ(take("w1", proto::Envelope::kHalt).size(), 1u);
  halted("w0", {piece(1, 2, 0, 1)});
  halted("w1", {piece(1, 2, 1, 1)});
  EXPECT_EQ(assignment("w1").world_size(), 2);
  EXPECT_FALSE(session_->outcome());
}

TEST_F(ChangeTest, ALostConnectionIsCountedUnlessAProcessWasLostToo) {
  train();
  commit(1, 1);
  lost_peer("w0", 1);
  halted("w0", {piece(1, 2, 0, 1), piece(1, 2, 1, 1)});
  halted("w1", {piece(1, 2, 1, 1)});
  const auto link_errors = [&] {
    std::map<std::string, int64_t> counts;
    const proto::Status status = session_->status(now_);
    for (const auto& member : status.members()) {
      counts[member.member_id()] = member.link_errors();
    }
    return counts;
  };
  EXPECT_EQ(link_errors()["id-w0"], 1);
  EXPECT_EQ(link_errors()["id-w1"], 0);
  ready("w0");
  ready("w1");
  commit(2, 2);
  lost_peer("w0", 2);
  killed("w1");
  halted("w0", {piece(2, 2, 0, 2), piece(2, 2, 1, 2)});
  EXPECT_EQ(assignment("w0").world_size(), 1);
  EXPECT_EQ(link_errors()["id-w0"], 1) << "that was the death of the other";
}

TEST_F(ChangeTest, AFailedGpuCostsItsWorkerOnly) {
  train();
  commit(1, 2);
  proto::Envelope failed;
  failed.mutable_worker_failed()->set_generation(1);
  failed.mutable_worker_failed()->set_device(true);
  failed.mutable_worker_failed()->set_error("GPU 3 failed: ECC");
  say("w1", failed);
  halted("w0", {piece(1, 2, 0, 2), piece(1, 2, 1, 2)});
  EXPECT_EQ(assignment("w0").world_size(), 1);
  EXPECT_FALSE(session_->outcome());
  EXPECT_NE(events().find("GPU 3 failed: ECC"), std::string::npos);
}

TEST_F(ChangeTest, ALeaverHandsOverAndIsLetGoOnceItsStateIsMirroredAnew) {
  train();
  proto::Envelope leaving;
  leaving.mutable_leaving()->set_reason("SIGTERM");
  say("w1", leaving);
  const proto::Assignment last = assignment("w1");
  EXPECT_EQ(ranks_["w1"], -1);
  EXPECT_THAT(members(last), ElementsAre("id-w0", "id-w1"));
  EXPECT_EQ(assignment("w0").world_size(), 1);
  for (int64_t step = 1; step <= 4; ++step) {
    report_from("w0", 1, 0, step);
    report_from("w1", 1, 1, step);
  }
  ready("w0");
  EXPECT_TRUE(take("w1", proto::Envelope::kStop).empty());
  report_from("w0", 2, 0, 5);
  const auto stops = take("w1", proto::Envelope::kStop);
  ASSERT_EQ(stops.size(), 1u);
  EXPECT_TRUE(stops[0].stop().ok());
  EXPECT_FALSE(session_->outcome());
}

// Worker 1 of three has left after step 8, and worker 2 has no memory for mirrors.
class LeaverTest : public ChangeTest {
 protected:
  LeaverTest() {
    train();
    hello("w2", proto::ROLE_WORKER);
    for (int64_t step = 1; step <= 4; ++step) {
      for (int rank = 0; rank < 2; ++rank) report_from("w" + std::to_string(rank), 1, rank, step);
    }
    for (const char* peer : {"w0", "w1", "w2"}) ready(peer);
    proto::Envelope leaving;
    leaving.mutable_leaving()->set_reason("SIGTERM");
    say("w1", leaving);
    for (int64_t step = 5; step <= 8; ++step) {
      for (int rank = 0; rank < 3; ++rank) report_from("w" + std::to_string(rank), 2, rank, step);
    }
    without_memory_ = {"w2"};
    for (const char* peer : {"w0", "w2"}) ready(peer);
    planned("w0");
  }
  // Whether worker 1 is let go then.
  bool train_both(int64_t step) {
    for (const char* peer : {"w0", "w2"}) report_from(peer, 3, ranks_[peer], step);
    return !take("w1", proto::Envelope::kStop).empty();
  }
};

TEST_F(LeaverTest, WaitsUntilTheOthersHaveTheMemoryToMirror) {
  EXPECT_FALSE(train_both(9));
  planned("w0");
  without_memory_.clear();
  EXPECT_FALSE(train_both(10));
  const auto next = planned("w0");
  ASSERT_EQ(next.size(), 1u);
  ASSERT_TRUE(next[0].mirror());
  for (int64_t step = 11; step < next[0].step(); ++step) EXPECT_FALSE(train_both(step)) << step;
  EXPECT_TRUE(train_both(next[0].step())) << "it carried the state to the mirrors";
  EXPECT_FALSE(session_->outcome());
}

TEST_F(LeaverTest, DoesNotWaitForeverForMirrors) {
  EXPECT_FALSE(train_both(9));
  for (int i = 0; i < 30; ++i) {
    now_ += 1;
    beat({"agent", "data", "w0", "w1", "w2"});
  }
  EXPECT_TRUE(train_both(10));
  EXPECT_FALSE(session_->outcome());
}

TEST_F(ChangeTest, TheLastWorkerTakesTheRunAlong) {
  train();
  proto::Envelope leaving;
  leaving.mutable_leaving()->set_reason("SIGTERM");
  say("agent", leaving);
  EXPECT_EQ(session_->phase(), Phase::kStopping);
}

TEST_F(ChangeTest, BelowTheMinimumTheStateIsSavedAndTheRunWaits) {
  config_.elastic.min_workers = 2;
  train();
  commit(1, 2);
  killed("w1");
  halted("w0", {piece(1, 2, 0, 2), piece(1, 2, 1, 2)});
  planned("w0");
  ready("w0");
  const auto steps = planned("w0");
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_TRUE(steps[0].save_only());
  EXPECT_EQ(steps[0].step(), 2);
  save(0, 2);
  EXPECT_THAT(session_->status(now_).reason(), HasSubstr("elastic.min_workers = 2"));

  hello("w2", proto::ROLE_WORKER);
  EXPECT_EQ(take("w2", proto::Envelope::kGoOver).at(0).go_over().resume_step(), 2);
  ready("w0");
  ready("w2");
  EXPECT_EQ(planned("w0").at(0).step(), 3);
}

TEST_F(ChangeTest, WaitingHasAnEnd) {
  wait_for_a_second_worker();
  for (int i = 0; i < 5 && !session_->outcome(); ++i) {
    now_ += 1;
    beat({"agent", "data", "w0"});
    tick();
  }
  ASSERT_TRUE(session_->outcome());
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("elastic.wait_timeout_s = 3"));
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("resume from step 2"));
}

TEST_F(ChangeTest, WaitingDoesNotEndWhileEnoughGetReady) {
  wait_for_a_second_worker();
  prepares_at_once_ = false;
  hello("w2", proto::ROLE_WORKER);
  for (int i = 0; i < 5; ++i) {
    now_ += 1;
    beat({"agent", "data", "w0", "w2"});
    tick();
  }
  EXPECT_FALSE(session_->outcome());
  prepared("w0");
  prepared("w2");
  ready("w0");
  ready("w2");
  EXPECT_EQ(planned("w2").at(0).step(), 3);
}

TEST_F(ChangeTest, ALoneWorkerThatDiesIsReplacedFromTheCheckpoint) {
  config_.checkpoint.every = 2;
  train();
  commit(1, 2);
  save(0, 2);
  save(1, 2);
  killed("w0");
  killed("w1");
  EXPECT_EQ(session_->phase(), Phase::kJoining);
  hello("w2", proto::ROLE_WORKER);
  const proto::Assignment next = assignment("w2");
  EXPECT_EQ(next.resume_step(), 2);
  EXPECT_EQ(next.world_size(), 1);
}

TEST_F(ChangeTest, ACrashThatEveryTryRepeatsEndsTheRun) {
  train();
  killed("w0");
  killed("w1");
  for (int i = 2; i < 60 && !session_->outcome(); ++i) {
    const std::string peer = "w" + std::to_string(i);
    hello(peer, proto::ROLE_WORKER);
    ready(peer);
    killed(peer);
  }
  ASSERT_TRUE(session_->outcome());
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("no step was committed in between"));
}

TEST_F(ChangeTest, WhoWasSilentAndReplacedIsToldToLeave) {
  train();
  commit(1, 1);
  for (int i = 0; i < 7; ++i) {
    now_ += 1;
    beat({"agent", "data", "w0"});
    tick();
  }
  EXPECT_EQ(take("agent", proto::Envelope::kEndProcess).at(0).end_process().member_id(), "id-w1");
  proto::Envelope heartbeat;
  heartbeat.mutable_heartbeat();
  say("w1", heartbeat);
  EXPECT_FALSE(take("w1", proto::Envelope::kStop).at(0).stop().ok());
}

TEST_F(ChangeTest, ARestartedDataServiceIsMadeKnown) {
  train();
  SessionTest::killed("data", proto::ROLE_DATA, 0.1);
  EXPECT_FALSE(session_->outcome());
  hello("data2", proto::ROLE_DATA);
  proto::Envelope report = dataset();
  report.mutable_dataset_report()->set_endpoint("ipc://@data2");
  say("data2", report);
  EXPECT_EQ(take("w1", proto::Envelope::kDataMoved).at(0).data_moved().endpoint(), "ipc://@data2");
}

TEST_F(ChangeTest, WhoWaitedInAnOldGenerationIsToldThatItIsOver) {
  train();
  commit(1, 2);
  lost_peer("w0", 1);
  halted("w0", {piece(1, 2, 0, 2)});
  halted("w1", {piece(1, 2, 1, 2)});
  ASSERT_EQ(session_->status(now_).generation(), 2u);
  take("w1", proto::Envelope::kHalt);
  lost_peer("w1", 1);
  EXPECT_EQ(take("w1", proto::Envelope::kHalt).at(0).halt().generation(), 1u);
  now_ += 2;
  tick();
  EXPECT_FALSE(session_->outcome());
}

}  // namespace
}  // namespace muster
