// A session that changes generations, for its tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/files.h"
#include "coordinator/session_testing.h"

namespace muster {

class ChangeTest : public SessionTest {
 protected:
  ChangeTest() {
    config_.train.steps = 40;
    config_.elastic.min_workers = 1;
    config_.elastic.wait_timeout_s = 60;
    config_.elastic.join_window_s = 0;
    config_.elastic.restarts = 3;
  }
  proto::Assignment assignment(const std::string& peer) {
    const auto all = take(peer, proto::Envelope::kAssignment);
    return all.empty() ? proto::Assignment{} : all.back().assignment();
  }
  static std::vector<std::string> members(const proto::Assignment& assignment) {
    std::vector<std::string> ids;
    for (const auto& member : assignment.members()) ids.push_back(member.member_id());
    return ids;
  }
  static std::vector<std::string> holders(const proto::Assignment& assignment) {
    std::vector<std::string> ids;
    for (const int holder : assignment.handover().holders()) {
      ids.push_back(assignment.members(holder).member_id());
    }
    return ids;
  }
  void report_from(const std::string& peer, uint64_t generation, int rank, int64_t step) {
    proto::Envelope envelope;
    auto* report = envelope.mutable_step_report();
    report->set_generation(generation);
    report->set_rank(rank);
    report->set_step(step);
    report->set_tokens(64);
    report->set_loss(1.0 / static_cast<double>(step));
    report->set_step_s(0.01);
    report->set_mirror_ready(!without_memory_.contains(peer));
    if (report->mirror_ready()) report->set_mirrored(step - 1);
    say(peer, envelope);
  }
  void killed(const std::string& peer) { SessionTest::killed(peer, proto::ROLE_WORKER, 0.1); }
  void halted(const std::string& peer, const std::vector<proto::Piece>& pieces) {
    proto::Envelope envelope;
    envelope.mutable_halted()->set_generation(session_->status(now_).generation());
    for (const proto::Piece& piece : pieces) *envelope.mutable_halted()->add_pieces() = piece;
    say(peer, envelope);
  }
  void lost_peer(const std::string& peer, uint64_t generation) {
    proto::Envelope failed;
    failed.mutable_worker_failed()->set_generation(generation);
    failed.mutable_worker_failed()->set_peer(true);
    failed.mutable_worker_failed()->set_error("lost rank 1");
    say(peer, failed);
  }
  static proto::Piece piece(uint64_t generation, int world, int part, int64_t step) {
    proto::Piece piece;
    piece.set_generation(generation);
    piece.set_world_size(world);
    piece.set_part(part);
    piece.set_step(step);
    return piece;
  }
  // w1 is lost after step 2, and one is too few: for 3 s it waits for more.
  void wait_for_a_second_worker() {
    config_.elastic.min_workers = 2;
    config_.elastic.wait_timeout_s = 3;
    train();
    commit(1, 2);
    killed("w1");
    halted("w0", {piece(1, 2, 0, 2), piece(1, 2, 1, 2)});
    ready("w0");
    save(0, 2);
  }
  std::string events() { return read_file(RunDir{dir_.path()}.events()); }
};

}  // namespace muster
