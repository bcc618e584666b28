// The session with scripted peers and a clock of its own: who is answered what, and how faults are
// told.
#include "coordinator/session.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>

#include "common/files.h"

namespace muster {
namespace {

using testing::HasSubstr;
using testing::Not;

class SessionTest : public testing::Test {
 protected:
  SessionTest() {
    config_.run.dir = dir_.path();
    config_.run.name = "test";
    config_.train.steps = 10;
    config_.train.global_batch = 4;
    config_.train.eval_every = 0;
    config_.elastic.heartbeat_s = 1;
    config_.elastic.join_timeout_s = 20;
    config_.elastic.shutdown_timeout_s = 5;
    std::filesystem::create_directories(RunDir{dir_.path()}.checkpoints());
  }

  void start(int workers = 2) {
    session_.reset();
    log_.reset();
    sent_.clear();
    closed_.clear();
    log_ = std::make_unique<RunLog>(RunDir{dir_.path()}, false);
    session_ = std::make_unique<Session>(
        config_,
        SessionOptions{
            .expected_workers = workers, .resume_command = resume_command_, .run_token = "token"},
        log_.get(),
        [this](const std::string& peer, proto::Envelope envelope) {
          if (closed_.contains(peer)) return false;
          if (!envelope.has_heartbeat()) sent_[peer].push_back(std::move(envelope));
          return true;
        },
        now_);
  }
  void say(const std::string& peer, const proto::Envelope& envelope) {
    session_->handle(peer, envelope, now_);
    session_->tick(now_);
  }
  void hello(const std::string& peer, proto::Role role, int workers = 0,
             const std::string& node = "id-agent") {
    proto::Envelope envelope;
    envelope.set_request_id(1);
    proto::Hello* hello = envelope.mutable_hello();
    hello->set_role(role);
    hello->set_member_id("id-" + peer);
    hello->set_node_id(node);
    hello->set_host("h");
    hello->set_pid(static_cast<int32_t>(1000 + peer.back()));
    hello->set_workers(workers);
    say(peer, envelope);
  }
  static proto::Envelope dataset() {
    proto::Envelope envelope;
    auto* report = envelope.mutable_dataset_report();
    report->set_fingerprint("f00d");
    report->set_train_samples(100);
    report->set_held_out_samples(10);
    report->set_vocab_size(256);
    report->set_endpoint("ipc://@data");
    return envelope;
  }
  // A node with two workers, up to the assignment.
  void assemble() {
    start();
    hello("agent", proto::ROLE_NODE, 2);
    hello("data", proto::ROLE_DATA);
    hello("w0", proto::ROLE_WORKER);
    hello("w1", proto::ROLE_WORKER);
    say("data", dataset());
  }
  void ready(const std::string& peer, const std::string& error = "") {
    proto::Envelope envelope;
    envelope.mutable_ready()->set_generation(session_->status(now_).generation());
    envelope.mutable_ready()->set_checkpoint_error(error);
    say(peer, envelope);
  }
  void train() {
    assemble();
    ready("w0");
    ready("w1");
  }
  void report(int rank, int64_t step) {
    proto::Envelope envelope;
    auto* report = envelope.mutable_step_report();
    report->set_generation(session_->status(now_).generation());
    report->set_rank(rank);
    report->set_step(step);
    report->set_tokens(64);
    report->set_loss(1.0 / static_cast<double>(step));
    report->set_step_s(0.01);
    say("w" + std::to_string(rank), envelope);
  }
  void commit(int64_t first, int64_t last) {
    for (int64_t step = first; step <= last; ++step) {
      report(0, step);
      report(1, step);
    }
  }
  void save(int rank, int64_t step, const std::string& error = "") {
    const RunDir run{dir_.path()};
    std::filesystem::create_directories(run.partial_checkpoint(step));
    const std::string name = "shard-" + std::to_string(rank);
    std::ofstream(run.partial_checkpoint(step) + "/" + name) << "12345678";
    proto::Envelope envelope;
    auto* saved = envelope.mutable_shard_saved();
    saved->set_generation(session_->status(now_).generation());
    saved->set_rank(rank);
    saved->set_step(step);
    saved->set_file(name);
    saved->set_bytes(8);
    saved->set_error(error);
    if (rank == 0) saved->set_manifest_json("{}");
    say("w" + std::to_string(rank), envelope);
  }
  void beat(std::initializer_list<const char*> peers) {
    proto::Envelope envelope;
    envelope.mutable_heartbeat();
    for (const char* peer : peers) session_->handle(peer, envelope, now_);
  }
  void everybody_leaves() {
    closed_ = {"agent", "data", "w0", "w1"};
    now_ += 0.1;
    session_->tick(now_);
  }

  // Messages to `peer` of one kind, oldest first; they are taken out.
  std::vector<proto::Envelope> take(const std::string& peer, proto::Envelope::BodyCase body) {
    std::vector<proto::Envelope> found;
    std::erase_if(sent_[peer], [&](const proto::Envelope& envelope) {
      if (envelope.body_case() != body) return false;
      found.push_back(envelope);
      return true;
    });
    return found;
  }
  std::vector<proto::PlannedStep> planned(const std::string& peer) {
    std::vector<proto::PlannedStep> steps;
    for (const auto& envelope : take(peer, proto::Envelope::kStepPlan)) {
      for (const auto& step : envelope.step_plan().steps()) steps.push_back(step);
    }
    return steps;
  }
  std::string stop_reason(const std::string& peer) {
    const auto stops = take(peer, proto::Envelope::kStop);
    return stops.empty() ? "(no stop)" : stops[0].stop().reason();
  }

  TempDir dir_;
  Config config_;
  std::string resume_command_;
  double now_ = 100;
  std::unique_ptr<RunLog> log_;
  std::unique_ptr<Session> session_;
  std::map<std::string, std::vector<proto::Envelope>> sent_;
  std::set<std::string> closed_;
};

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
    EXPECT_EQ(assigned[0].assignment().rank(), rank);
    EXPECT_EQ(assigned[0].assignment().world_size(), 2);
    EXPECT_EQ(assigned[0].assignment().members_size(), 2);
    EXPECT_EQ(assigned[0].assignment().resume_step(), 0);
    EXPECT_EQ(assigned[0].assignment().held_out_samples(), 10);
    EXPECT_EQ(assigned[0].assignment().data_endpoint(), "ipc://@data");
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
  proto::Envelope exited;
  exited.mutable_process_exited()->set_member_id("id-w1");
  exited.mutable_process_exited()->set_signalled(true);
  exited.mutable_process_exited()->set_code(9);
  say("agent", exited);
  ASSERT_TRUE(session_->outcome());
  EXPECT_FALSE(session_->outcome()->ok);
  const std::string reason = stop_reason("w0");
  EXPECT_THAT(reason, HasSubstr("worker 1 (pid 1049 on host h) was killed by SIGKILL"));
  EXPECT_THAT(reason, HasSubstr("at step 3; resume from step 2 with: muster train "));
  EXPECT_THAT(reason, Not(HasSubstr("Connection reset")));
  EXPECT_THAT(read_file(RunDir{dir_.path()}.events()), HasSubstr("\"kind\":\"fault\""));
}

TEST_F(SessionTest, TheHintToResumeIsTheCommandThatStartedTheRun) {
  resume_command_ = "muster coordinator a.toml --listen 'tcp://*:29400'";
  train();
  session_->request_stop("second signal", true, now_);
  EXPECT_THAT(session_->outcome()->reason,
              HasSubstr("there is no checkpoint yet, start again with: " + resume_command_));
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
  session_->tick(now_);
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
  session_->tick(now_);
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
  say("agent", exited);
  EXPECT_THAT(session_->outcome()->reason,
              HasSubstr("a data service (pid 77 on host h) exited with status 1"));
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("logs"));
}

TEST_F(SessionTest, ABrokenConnectionIsForgivenOnlyIfItComesBack) {
  train();
  closed_.insert("data");
  now_ += 1.0;
  session_->tick(now_);
  EXPECT_FALSE(session_->outcome());
  closed_.clear();
  now_ += 0.5;
  beat({"agent", "data", "w0", "w1"});
  session_->tick(now_);
  now_ += 0.6;
  session_->tick(now_);
  EXPECT_FALSE(session_->outcome());

  closed_ = {"w0", "agent"};  // a whole node, as seen by the next heartbeats
  beat({"data", "w1"});
  now_ += 1.0;
  session_->tick(now_);
  now_ += 1.1;
  session_->tick(now_);
  ASSERT_TRUE(session_->outcome());
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("node agent (pid"));
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("its connection closed"));
}

TEST_F(SessionTest, SilenceEndsTheRun) {
  train();
  for (int i = 0; i < 7 && !session_->outcome(); ++i) {
    now_ += 1;
    beat({"agent", "data", "w0"});
    session_->tick(now_);
  }
  ASSERT_TRUE(session_->outcome());
  EXPECT_THAT(session_->outcome()->reason,
              HasSubstr("worker 1 (pid 1049 on host h) has been silent"));
  const auto stops = take("agent", proto::Envelope::kStop);
  ASSERT_EQ(stops.size(), 1u);
  EXPECT_THAT(stops[0].stop().silent(), testing::ElementsAre("id-w1"));
  closed_ = {"agent", "data", "w0"};
  now_ += 0.1;
  session_->tick(now_);
  EXPECT_TRUE(session_->over()) << "a silent member is not waited for";
}

TEST_F(SessionTest, MissingMembersAreNamedAtTheJoinTimeout) {
  start();
  hello("agent", proto::ROLE_NODE, 2);
  EXPECT_THAT(session_->status(now_).reason(), HasSubstr("0 of 2 workers have joined (h: 0 of 2)"));
  for (int i = 0; i < 25 && !session_->outcome(); ++i) {
    now_ += 1;
    beat({"agent"});
    session_->tick(now_);
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
    session_->tick(now_);
  }
  ASSERT_TRUE(session_->outcome());
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("not ready within"));
  EXPECT_THAT(session_->outcome()->reason, HasSubstr("worker 1 (pid"));
  EXPECT_THAT(session_->outcome()->reason, Not(HasSubstr("worker 0")));
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
  session_->tick(now_);
  now_ += 1.1;
  session_->tick(now_);
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
    std::istringstream lines(read_file(RunDir{dir_.path()}.events()));
    for (std::string line; std::getline(lines, line);) {
      if (line.find("\"kind\":\"warning\"") != std::string::npos) found.push_back(line);
    }
    return found;
  };
  EXPECT_THAT(warnings(2, 10), testing::IsEmpty());
  EXPECT_THAT(warnings(2, 0),
              testing::ElementsAre(testing::AllOf(
                  HasSubstr("data.held_out = 0.25 leaves none of the 3 documents"),
                  HasSubstr("raise that, or add documents; or set train.eval_every = 0"))));
  config_.train.eval_samples = 0;
  EXPECT_THAT(warnings(2, 10),
              testing::ElementsAre(HasSubstr("train.eval_samples is 0: raise it; or set")));
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
  hello("late", proto::ROLE_WORKER);
  EXPECT_THAT(take("late", proto::Envelope::kRefused).at(0).refused().reason(), HasSubstr("fixed"));
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
  session_->tick(now_);
  EXPECT_FALSE(session_->over());
  now_ += 0.2;
  session_->tick(now_);
  EXPECT_TRUE(session_->over());
  EXPECT_THAT(read_file(RunDir{dir_.path()}.events()), HasSubstr("did not leave within 5 s"));
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
