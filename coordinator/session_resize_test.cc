// That a generation gets ready beside the one that trains, and what happens when that fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "coordinator/change_testing.h"

namespace muster {
namespace {

using testing::HasSubstr;

// Workers w0 and w1 train, up to step 4 is handed out, and w2 joins.
class PreparingTest : public ChangeTest {
 protected:
  PreparingTest() {
    prepares_at_once_ = false;
    train();
    hello("w2", proto::ROLE_WORKER);
    EXPECT_EQ(assignment("w2").generation(), 2u);
    EXPECT_EQ(assignment("w0").world_size(), 3);
    EXPECT_EQ(assignment("w1").world_size(), 3);
    EXPECT_EQ(last_planned(), 4);
  }
  int64_t last_planned() {
    const auto steps = planned("w0");
    return steps.empty() ? 0 : steps.back().step();
  }
  // By both, in the generation that trains.
  void trained(int64_t step) {
    for (int rank = 0; rank < 2; ++rank) report_from("w" + std::to_string(rank), 1, rank, step);
  }
  void failed(const std::string& peer) {
    proto::Envelope envelope;
    envelope.mutable_worker_failed()->set_generation(session_->status(now_).generation());
    envelope.mutable_worker_failed()->set_peer(true);
    envelope.mutable_worker_failed()->set_error("no way to rank 0");
    say(peer, envelope);
  }
  // The step that the newest generation goes on from, as all were told; 0: it does not begin yet.
  int64_t goes_over(std::initializer_list<const char*> peers) {
    int64_t step = 0;
    for (const char* peer : peers) {
      const auto words = take(peer, proto::Envelope::kGoOver);
      if (words.empty()) return 0;
      EXPECT_EQ(words.back().go_over().generation(), session_->status(now_).generation());
      EXPECT_TRUE(step == 0 || step == words.back().go_over().resume_step());
      step = words.back().go_over().resume_step();
    }
    return step;
  }
  void wait(int seconds, std::initializer_list<const char*> alive) {
    for (int i = 0; i < seconds; ++i) {
      now_ += 1;
      beat(alive);
      tick();
    }
  }
  void expect_nobody_halted(std::initializer_list<const char*> peers) {
    for (const char* peer : peers) EXPECT_TRUE(take(peer, proto::Envelope::kHalt).empty()) << peer;
  }
};

TEST_F(PreparingTest, StepsAreHandedOutUntilAllArePrepared) {
  trained(1);
  EXPECT_EQ(last_planned(), 5);
  prepared("w2");
  prepared("w0");
  prepared("w0");
  trained(2);
  EXPECT_EQ(last_planned(), 6);
  EXPECT_EQ(goes_over({"w0"}), 0) << "w1 has not said anything";
  EXPECT_EQ(session_->status(now_).phase(), "training");
  prepared("w1");
  EXPECT_EQ(goes_over({"w0", "w1", "w2"}), 6);
  trained(3);
  EXPECT_EQ(last_planned(), 0) << "what is handed out is the last of it";
  for (int64_t step = 4; step <= 6; ++step) trained(step);
  for (const char* peer : {"w0", "w1", "w2"}) ready(peer);
  EXPECT_EQ(session_->phase(), Phase::kTraining);
  EXPECT_EQ(planned("w2").at(0).step(), 7);
}

TEST_F(PreparingTest, WithoutRoomOnAGpuNobodyWaitsForItsConnections) {
  prepared("w0", /*complete=*/false, /*crowded=*/false);
  prepared("w1", /*complete=*/false, /*crowded=*/true);
  EXPECT_EQ(goes_over({"w0"}), 0);
  prepared("w2", /*complete=*/false, /*crowded=*/false);
  EXPECT_EQ(goes_over({"w0", "w1", "w2"}), 4);
}

TEST_F(PreparingTest, ANewcomerThatDiesWhileItPreparesCostsNothing) {
  prepared("w0");
  prepared("w1");
  SessionTest::killed("w2", proto::ROLE_WORKER, -1);
  EXPECT_TRUE(assignment("w0").members().empty()) << "those who train are as many as before";
  expect_nobody_halted({"w0", "w1"});
  trained(1);
  EXPECT_EQ(last_planned(), 5);
  prepared("w2");
  EXPECT_EQ(goes_over({"w0"}), 0);
  // What was said of that generation does not count for another one.
  hello("w3", proto::ROLE_WORKER);
  EXPECT_EQ(assignment("w0").generation(), 3u);
  EXPECT_EQ(assignment("w3").world_size(), 3);
  prepared("w3");
  EXPECT_EQ(goes_over({"w0"}), 0);
  prepared("w0");
  prepared("w1");
  EXPECT_EQ(goes_over({"w0", "w1", "w3"}), 5);
}

TEST_F(PreparingTest, ANewcomerThatFailsTriesAgainAndThenIsLost) {
  for (uint64_t generation = 2; generation <= 4; ++generation) {
    failed("w2");
    const auto halts = take("w2", proto::Envelope::kHalt);
    ASSERT_EQ(halts.size(), 1u);
    EXPECT_EQ(halts[0].halt().generation(), generation);
    EXPECT_TRUE(assignment("w2").members().empty()) << "it may be busy yet";
    proto::Envelope answer;
    answer.mutable_halted()->set_generation(generation);
    say("w2", answer);
    EXPECT_EQ(assignment("w2").generation(), generation + 1);
    EXPECT_EQ(assignment("w1").world_size(), 3);
  }
  failed("w2");
  EXPECT_EQ(take("agent", proto::Envelope::kEndProcess).size(), 1u);
  EXPECT_TRUE(assignment("w1").members().empty());
  expect_nobody_halted({"w0", "w1"});
  EXPECT_THAT(events(), HasSubstr("no way to rank 0"));
}

TEST_F(PreparingTest, WhatANewcomerFailsByItselfIsItsEndAlone) {
  proto::Envelope envelope;
  envelope.mutable_worker_failed()->set_generation(2);
  envelope.mutable_worker_failed()->set_error("no memory");
  say("w2", envelope);
  EXPECT_EQ(take("agent", proto::Envelope::kEndProcess).size(), 1u);
  expect_nobody_halted({"w0", "w1"});
  EXPECT_FALSE(session_->outcome());
}

// w3 waits for w2, which has not even begun to connect.
TEST_F(PreparingTest, ANewcomerThatHangsIsLostAndNotThoseWhoWaitForIt) {
  hello("w3", proto::ROLE_WORKER);
  failed("w2");
  failed("w3");
  proto::Envelope answer;
  answer.mutable_halted()->set_generation(3);
  for (const char* peer : {"w2", "w3"}) session_->handle(peer, answer, now_);
  tick();
  EXPECT_EQ(assignment("w2").world_size(), 4);
  proto::Envelope shown;
  shown.mutable_store_set()->set_key("4/mesh/3");
  say("w3", shown);
  prepared("w0");
  prepared("w1");
  wait(22, {"agent", "data", "w0", "w1", "w2", "w3"});
  const auto ended = take("agent", proto::Envelope::kEndProcess);
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].end_process().member_id(), "id-w2");
  EXPECT_THAT(events(), HasSubstr("not prepared within"));
  expect_nobody_halted({"w0", "w1"});
  answer.mutable_halted()->set_generation(session_->status(now_).generation());
  say("w3", answer);
  EXPECT_EQ(assignment("w3").world_size(), 3);
}

// Or it would wait for a generation that never begins, and keep the next one from beginning.
TEST_F(PreparingTest, WhoIsLeftOutOfTheNextTryIsTold) {
  hello("w3", proto::ROLE_WORKER);
  SessionTest::killed("w2", proto::ROLE_WORKER, -1);
  EXPECT_TRUE(take("w3", proto::Envelope::kHalt).empty()) << "it was not in that one";
  EXPECT_EQ(assignment("w3").generation(), 3u);
  SessionTest::killed("w1", proto::ROLE_WORKER, -1);
  EXPECT_EQ(take("w3", proto::Envelope::kHalt).size(), 1u);
  EXPECT_EQ(session_->phase(), Phase::kHalting);
  for (const char* peer : {"w0", "w3"}) {
    proto::Envelope answer;
    answer.mutable_halted()->set_generation(3);
    if (peer == std::string("w0")) {
      for (int part = 0; part < 2; ++part) {
        proto::Piece* piece = answer.mutable_halted()->add_pieces();
        piece->set_generation(1);
        piece->set_world_size(2);
        piece->set_part(part);
        piece->set_step(0);
      }
    }
    say(peer, answer);
    if (peer == std::string("w0")) {
      EXPECT_EQ(assignment("w0").world_size(), 1) << "a recovery does not wait for newcomers";
    }
  }
}

TEST_F(PreparingTest, WhoIsAskedToLeaveMeanwhileIsNotTakenAlong) {
  proto::Envelope leaving;
  leaving.mutable_leaving()->set_reason("SIGTERM");
  say("w1", leaving);
  EXPECT_EQ(take("w2", proto::Envelope::kHalt).size(), 1u);
  const proto::Assignment next = assignment("w0");
  EXPECT_EQ(next.generation(), 3u);
  EXPECT_EQ(next.world_size(), 1);
  EXPECT_EQ(next.members_size(), 2) << "w1 hands over";
}

TEST_F(PreparingTest, WhoTrainsAndDoesNotSayThatItIsPreparedGoesOverAllTheSame) {
  prepared("w0");
  prepared("w2");
  wait(22, {"agent", "data", "w0", "w1", "w2"});
  EXPECT_EQ(goes_over({"w0", "w1", "w2"}), 4);
}

TEST_F(PreparingTest, ACrashOfWhoTrainsIsACrash) {
  prepared("w2");
  SessionTest::killed("w1", proto::ROLE_WORKER, 0.1);
  EXPECT_EQ(session_->phase(), Phase::kHalting);
  EXPECT_EQ(take("w2", proto::Envelope::kHalt).size(), 1u);
}

TEST_F(PreparingTest, AStopDoesNotWaitForNewcomers) {
  session_->request_stop("enough", /*immediately=*/false, now_);
  EXPECT_EQ(session_->phase(), Phase::kStopping);
  EXPECT_EQ(last_planned(), 5);
  for (const char* peer : {"w0", "w1", "w2"}) prepared(peer);
  EXPECT_EQ(goes_over({"w0"}), 0);
  // Nor does it matter what becomes of them.
  SessionTest::killed("w2", proto::ROLE_WORKER, -1);
  EXPECT_EQ(session_->phase(), Phase::kStopping);
  expect_nobody_halted({"w0", "w1"});
  for (int64_t step = 1; step <= 5; ++step) trained(step);
  save(0, 5, "", /*generation=*/1);
  save(1, 5, "", /*generation=*/1);
  ASSERT_TRUE(session_->outcome());
  EXPECT_TRUE(session_->outcome()->ok);
}

}  // namespace
}  // namespace muster
