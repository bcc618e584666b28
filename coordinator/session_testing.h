// A session with scripted peers and a clock of its own, for its tests.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "common/files.h"
#include "common/protocol/assignment.h"
#include "coordinator/session.h"

namespace muster {

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
    // Of fixed size, unless a test has it otherwise.
    config_.elastic.min_workers = 2;
    config_.elastic.wait_timeout_s = 0;
    config_.elastic.restarts = 0;
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
        [this](const std::string& peer, const Message& message) {
          if (closed_.contains(peer)) return false;
          const proto::Envelope& envelope = message.envelope();
          if (envelope.has_assignment()) {
            ranks_[peer] = place_of(peer, envelope).rank;
            if (envelope.assignment().prepare()) preparing_.insert(peer);
          }
          if (!envelope.has_heartbeat()) sent_[peer].push_back(envelope);
          return true;
        },
        now_);
  }
  void say(const std::string& peer, const proto::Envelope& envelope) {
    session_->handle(peer, envelope, now_);
    tick();
  }
  void tick() {
    session_->tick(now_);
    if (prepares_at_once_) {
      for (const std::string& peer : std::exchange(preparing_, {})) prepared(peer);
    }
  }
  // By default all that it does beside the generation that trains is done.
  void prepared(const std::string& peer, bool complete = true, bool crowded = false) {
    proto::Envelope envelope;
    envelope.mutable_prepared()->set_generation(session_->status(now_).generation());
    envelope.mutable_prepared()->set_complete(complete);
    envelope.mutable_prepared()->set_crowded(crowded);
    say(peer, envelope);
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
    envelope.mutable_ready()->set_part(ranks_[peer]);
    envelope.mutable_ready()->set_mirror_ready(!without_memory_.contains(peer));
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
    const bool mirrors = !without_memory_.contains("w" + std::to_string(rank));
    report->set_mirror_ready(mirrors);
    if (mirrors) report->set_mirrored(step - 1);
    say("w" + std::to_string(rank), envelope);
  }
  void commit(int64_t first, int64_t last) {
    for (int64_t step = first; step <= last; ++step) {
      report(0, step);
      report(1, step);
    }
  }
  // generation 0: the newest.
  void save(int rank, int64_t step, const std::string& error = "", uint64_t generation = 0) {
    const RunDir run{dir_.path()};
    std::filesystem::create_directories(run.partial_checkpoint(step));
    const std::string name = "shard-" + std::to_string(rank);
    std::ofstream(run.partial_checkpoint(step) + "/" + name) << "12345678";
    proto::Envelope envelope;
    auto* saved = envelope.mutable_shard_saved();
    saved->set_generation(generation > 0 ? generation : session_->status(now_).generation());
    saved->set_rank(rank);
    saved->set_part(rank);
    saved->set_step(step);
    saved->set_file(name);
    saved->set_bytes(8);
    saved->set_error(error);
    if (rank == 0) saved->set_manifest_json("{}");
    say("w" + std::to_string(rank), envelope);
  }
  // The agent's word that a process was killed, and whether another one takes its place.
  void killed(const std::string& peer, proto::Role role, double restart_in_s) {
    proto::Envelope exited;
    exited.mutable_process_exited()->set_role(role);
    exited.mutable_process_exited()->set_member_id("id-" + peer);
    exited.mutable_process_exited()->set_signalled(true);
    exited.mutable_process_exited()->set_code(9);
    exited.mutable_process_exited()->set_restart_in_s(restart_in_s);
    say("agent", exited);
  }
  void beat(std::initializer_list<const char*> peers) {
    proto::Envelope envelope;
    envelope.mutable_heartbeat();
    for (const char* peer : peers) session_->handle(peer, envelope, now_);
  }
  static Place place_of(const std::string& peer, const proto::Envelope& envelope) {
    return muster::place_of("id-" + peer, envelope.assignment());
  }
  void everybody_leaves() {
    closed_ = {"agent", "data", "w0", "w1"};
    now_ += 0.1;
    tick();
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
  std::set<std::string> without_memory_;  // for mirrors
  bool prepares_at_once_ = true;          // each member of a generation that follows another one
  std::set<std::string> preparing_;
  std::map<std::string, int> ranks_;  // peer → rank in the newest assignment
};

}  // namespace muster
