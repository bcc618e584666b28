// The session with scripted peers and a clock of its own: who is answered what, from the first
// hello to the last step.
#include "coordinator/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/files.h"
#include "coordinator/json_lines.h"
#include "coordinator/session_testing.h"

namespace muster {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST_F(SessionTest, EveryoneIsWelcomedAndTheWorkersAreAssigned) {
  assemble();
  for (const char* peer : {"agent", "data", "w0", "w1"}) {
    const auto welcomes = take(peer, proto::Envelope::kWelcome);
    ASSERT_EQ(welcomes.size(), 1u) << peer;
    EXPECT_EQ(welcomes[0].request_id(), 1u);
    EXPECT_EQ(welcomes[0].welcome().run_dir(), dir_.path());
    EXPECT_EQ(parse_config(welcomes[0].welcome().config_toml(), "welcome").train.steps, 10);
  }
  for (int rank = 0; rank < 2; ++rank) {
    const auto assigned = take("w" + std::to_string(rank), proto::Envelope::kAssignment);
    ASSERT_EQ(assigned.size(), 1u);
    const Place place = place_of("w" + std::to_string(rank), assigned[0]);
    EXPECT_EQ(place.rank, rank);
    EXPECT_EQ(assigned[0].assignment().world_size(), 2);
    EXPECT_EQ(assigned[0].assignment().members_size(), 2);
    EXPECT_EQ(assigned[0].assignment().resume_step(), 0);
    EXPECT_EQ(assigned[0].assignment().held_out_samples(), 10);
    EXPECT_EQ(place.data_endpoint, "ipc://@data");
  }
  EXPECT_EQ(session_->phase(), Phase::kStarting);
}

TEST_F(SessionTest, StepsAreHandedOutAheadAndCommittedWhenAllHaveReported) {
  train();
  auto steps = planned("w0");
  ASSERT_EQ(steps.size(), 4u);
  EXPECT_EQ(steps[0].step(), 1);
  EXPECT_EQ(steps[0].samples_size(), 2);
  EXPECT_EQ(steps[0].global_samples(), 4);
  report(0, 1);
  EXPECT_EQ(session_->status(now_).step(), 0) << "rank 1 is missing";
  report(1, 1);
  const proto::Status status = session_->status(now_);
  EXPECT_EQ(status.step(), 1);
  EXPECT_EQ(status.tokens(), 64);
  EXPECT_EQ(status.phase(), "training");
  EXPECT_EQ(status.members(2).rank(), 0);
  EXPECT_EQ(status.members(2).state(), "active");
  steps = planned("w0");
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_EQ(steps[0].step(), 5);
}

TEST_F(SessionTest, AFinishedRunSavesAndEndsWell) {
  train();
  commit(1, 10);
  EXPECT_FALSE(session_->outcome()) << "its last checkpoint is still missing";
  const auto steps = planned("w1");
  ASSERT_EQ(steps.size(), 10u);
  EXPECT_TRUE(steps[9].save() && steps[9].last());
  save(0, 10);
  save(1, 10);
  ASSERT_TRUE(session_->outcome());
  EXPECT_TRUE(session_->outcome()->ok);
  EXPECT_TRUE(take("w0", proto::Envelope::kCheckpointResult).at(0).checkpoint_result().committed());
  EXPECT_EQ(stop_reason("w0"), "finished: 10 steps");
  EXPECT_EQ(read_checkpoint(RunDir{dir_.path()}, 10).tokens, 640);
  EXPECT_FALSE(session_->over());
  everybody_leaves();
  EXPECT_TRUE(session_->over());
}

TEST_F(SessionTest, AResumedRunGoesOnFromItsCheckpoint) {
  config_.checkpoint.every = 4;
  train();
  commit(1, 4);
  save(0, 4);
  save(1, 4);
  commit(5, 6);
  assemble();  // a new coordinator in the same directory
  const auto assigned = take("w1", proto::Envelope::kAssignment);
  ASSERT_EQ(assigned.size(), 1u);
  EXPECT_EQ(assigned[0].assignment().generation(), 2u);
  EXPECT_EQ(assigned[0].assignment().resume_step(), 4);
  EXPECT_THAT(assigned[0].assignment().checkpoint_path(), HasSubstr("step-00000004"));
  EXPECT_EQ(session_->status(now_).resume_step(), 4);
  ready("w0");
  ready("w1");
  EXPECT_EQ(planned("w0").at(0).step(), 5);
  commit(5, 5);
  EXPECT_EQ(session_->status(now_).tokens(), 5 * 64);
}

TEST_F(SessionTest, ACheckpointThatAWorkerCannotLoadIsPassedOver) {
  config_.checkpoint.every = 2;
  train();
  for (int64_t step : {2, 4}) {
    commit(step - 1, step);
    save(0, step);
    save(1, step);
  }
  assemble();
  ready("w0");
  ready("w1", "shard-1: hash mismatch");
  auto assigned = take("w0", proto::Envelope::kAssignment);
  ASSERT_EQ(assigned.size(), 2u);
  EXPECT_EQ(assigned[1].assignment().generation(), 3u);
  EXPECT_EQ(assigned[1].assignment().resume_step(), 2);
  ready("w0", "shard-0: torn");
  ready("w1");
  ASSERT_TRUE(session_->outcome());
  EXPECT_FALSE(session_->outcome()->ok);
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("no checkpoint in"));
  EXPECT_THAT(session_->outcome()->reason, Not(HasSubstr("resume from")));
  EXPECT_THAT(read_file(RunDir{dir_.path()}.events()), HasSubstr("shard-1: hash mismatch"));
}

TEST_F(SessionTest, AFinishedRunHasNothingToDo) {
  train();
  commit(1, 10);
  save(0, 10);
  save(1, 10);
  assemble();
  ASSERT_TRUE(session_->outcome());
  EXPECT_TRUE(session_->outcome()->ok);
  EXPECT_THAT(stop_reason("w0"), HasSubstr("nothing to do"));
}

TEST_F(SessionTest, AFailedSaveIsAWarningAndTheRunGoesOn) {
  config_.checkpoint.every = 2;
  train();
  commit(1, 2);
  save(0, 2);
  save(1, 2, "shard-1: No space left on device");
  EXPECT_FALSE(session_->outcome());
  const auto results = take("w0", proto::Envelope::kCheckpointResult);
  ASSERT_EQ(results.size(), 1u);
  EXPECT_FALSE(results[0].checkpoint_result().committed());
  EXPECT_THAT(results[0].checkpoint_result().error(), HasSubstr("No space left"));
  EXPECT_TRUE(std::filesystem::is_empty(RunDir{dir_.path()}.checkpoints()));
  commit(3, 4);
  EXPECT_EQ(session_->status(now_).step(), 4);
}

TEST_F(SessionTest, AFailedLastSaveEndsTheRunBadly) {
  train();
  commit(1, 10);
  save(0, 10, "disk full");
  save(1, 10);
  ASSERT_TRUE(session_->outcome());
  EXPECT_FALSE(session_->outcome()->ok);
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("worker 0: disk full"));
}

TEST_F(SessionTest, ANodeThatWithdrawsIsAsIfItHadNotCome) {
  start();
  hello("agentX", proto::ROLE_NODE, 2, "id-agentX");
  EXPECT_EQ(take("agentX", proto::Envelope::kWelcome).at(0).welcome().run_token(), "token");
  proto::Envelope withdrawn;
  withdrawn.mutable_withdrawn()->set_reason("it does not share the run directory");
  say("agentX", withdrawn);
  closed_.insert("agentX");
  now_ += 1.0;
  tick();
  now_ += 1.1;
  tick();
  EXPECT_FALSE(session_->outcome());
  EXPECT_THAT(read_file(RunDir{dir_.path()}.events()),
              HasSubstr("it does not share the run directory"));
  hello("agent", proto::ROLE_NODE, 2);  // there is room for another
  EXPECT_EQ(take("agent", proto::Envelope::kWelcome).size(), 1u);
  hello("data", proto::ROLE_DATA);
  hello("w0", proto::ROLE_WORKER);
  hello("w1", proto::ROLE_WORKER);
  say("data", dataset());
  EXPECT_EQ(session_->phase(), Phase::kStarting);
}

TEST_F(SessionTest, ThatNothingIsEvaluatedIsSaidOnceWithTheRemedy) {
  config_.train.eval_every = 5;
  config_.data.held_out = 0.25;
  const auto warnings = [&](int nodes, int64_t held_out) {
    std::filesystem::remove(RunDir{dir_.path()}.events());
    start(4);
    proto::Envelope report = dataset();
    report.mutable_dataset_report()->set_documents(3);
    report.mutable_dataset_report()->set_held_out_samples(held_out);
    for (int node = 0; node < nodes; ++node) {
      hello("data" + std::to_string(node), proto::ROLE_DATA, 0, "node" + std::to_string(node));
      say("data" + std::to_string(node), report);
    }
    std::vector<std::string> found;
    for (const auto& event : read_json_lines(RunDir{dir_.path()}.events())) {
      if (event.at("kind") == "warning") found.push_back(event.at("reason"));
    }
    return found;
  };
  EXPECT_THAT(warnings(2, 10), testing::IsEmpty());
  EXPECT_THAT(warnings(2, 0),
              testing::ElementsAre(testing::AllOf(
                  HasSubstr("data.held_out = 0.25 leaves none of the 3 documents"),
                  HasSubstr("raise that, or add documents; or set train.eval_every = 0"))));
}

TEST_F(SessionTest, TheStoreServesTheRendezvous) {
  assemble();
  proto::Envelope get;
  get.mutable_store_get()->set_key("1/a");
  say("w1", get);
  EXPECT_TRUE(take("w1", proto::Envelope::kStoreValue).empty());
  proto::Envelope set;
  set.mutable_store_set()->set_key("1/a");
  set.mutable_store_set()->set_value("v");
  say("w0", set);
  EXPECT_EQ(take("w1", proto::Envelope::kStoreValue).at(0).store_value().value(), "v");
  say("w0", get);
  EXPECT_EQ(take("w0", proto::Envelope::kStoreValue).at(0).store_value().value(), "v");
}

TEST_F(SessionTest, AChangedDatasetIsAWarning) {
  config_.checkpoint.every = 2;
  train();
  commit(1, 2);
  save(0, 2);
  save(1, 2);
  start();
  hello("agent", proto::ROLE_NODE, 2);
  hello("data", proto::ROLE_DATA);
  hello("w0", proto::ROLE_WORKER);
  hello("w1", proto::ROLE_WORKER);
  proto::Envelope other = dataset();
  other.mutable_dataset_report()->set_fingerprint("beef");
  say("data", other);
  EXPECT_EQ(take("w0", proto::Envelope::kAssignment).at(0).assignment().resume_step(), 2);
  EXPECT_THAT(read_file(RunDir{dir_.path()}.events()), HasSubstr("the dataset has changed"));
}

}  // namespace
}  // namespace muster
