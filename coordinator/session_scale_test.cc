// That a session's work grows with the number of messages, not with that times the number of
// members: with so many of them anything else takes minutes.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>
#include <time.h>

#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "common/files.h"
#include "coordinator/session.h"

namespace muster {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kWorkers = 512;
constexpr bool kTimed = false;
#else
constexpr int kWorkers = 8192;
constexpr bool kTimed = true;
#endif
constexpr int kOnNode = 8;

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  constexpr double kNano = 1e-9;
  return static_cast<double>(time.tv_sec) + kNano * static_cast<double>(time.tv_nsec);
}

class SessionScaleTest : public testing::Test {
 protected:
  SessionScaleTest() {
    spdlog::set_level(spdlog::level::off);
    config_.run.dir = dir_.path();
    config_.run.device = "cpu";
    config_.train.steps = 1000;
    config_.train.global_batch = kWorkers;
    config_.train.eval_every = 0;
    std::filesystem::create_directories(RunDir{dir_.path()}.checkpoints());
    log_ = std::make_unique<RunLog>(RunDir{dir_.path()}, false);
    session_ = std::make_unique<Session>(
        config_,
        SessionOptions{.expected_workers = kWorkers, .resume_command = "", .run_token = ""},
        log_.get(),
        [this](const std::string& peer, const Message& message) { return sent(peer, message); },
        now_);
  }
  ~SessionScaleTest() override { spdlog::set_level(level_); }

  bool sent(const std::string&, const Message& message) {
    const proto::Envelope& envelope = message.envelope();
    if (envelope.has_assignment()) {
      if (envelope.assignment().generation() != generation_) encodings_.clear();
      generation_ = envelope.assignment().generation();
      encodings_.insert(message.bytes().data());
      assignment_ = message;
    }
    halts_ += envelope.has_halt();
    plans_ += envelope.has_step_plan();
    return true;
  }
  void say(const std::string& peer, const proto::Envelope& envelope) {
    ++said_;
    session_->handle(peer, envelope, now_);
    session_->tick(now_);
  }
  // What follows closely on one another is looked at together, a little later.
  void settle() {
    now_ += 0.1;
    session_->tick(now_);
  }

  void hello(proto::Role role, const std::string& id, const std::string& node) {
    proto::Envelope envelope;
    proto::Hello* hello = envelope.mutable_hello();
    hello->set_role(role);
    hello->set_member_id(id);
    hello->set_node_id(node);
    hello->set_host("host-" + node);
    hello->set_pid(1);
    hello->set_workers(role == proto::ROLE_NODE ? kOnNode : 0);
    hello->set_device("cpu");
    say(id, envelope);
  }
  void join() {
    for (int i = 0; i < kWorkers; ++i) {
      const std::string node = fmt::format("{:032}", i / kOnNode);
      if (i % kOnNode == 0) {
        hello(proto::ROLE_NODE, node, node);
        hello(proto::ROLE_DATA, "data" + node, node);
      }
      hello(proto::ROLE_WORKER, fmt::format("worker{:026}", i), node);
      now_ += 1e-4;
    }
    for (int i = 0; i < kWorkers; i += kOnNode) {
      proto::Envelope envelope;
      envelope.mutable_dataset_report()->set_fingerprint("f00d");
      envelope.mutable_dataset_report()->set_train_samples(10L * kWorkers);
      envelope.mutable_dataset_report()->set_endpoint("ipc://@data");
      say(fmt::format("data{:032}", i / kOnNode), envelope);
    }
    settle();
  }
  // Everybody in the newest generation says something, that depends on the rank.
  template <typename Fill>
  void all_say(Fill fill) {
    const Message assignment = *assignment_;
    const proto::Assignment& list = assignment.envelope().assignment();
    for (int rank = 0; rank < list.world_size(); ++rank) {
      proto::Envelope envelope;
      fill(rank, &envelope);
      say(list.members(rank).member_id(), envelope);
    }
  }
  void ready() {
    all_say([&](int rank, proto::Envelope* envelope) {
      envelope->mutable_ready()->set_generation(generation_);
      envelope->mutable_ready()->set_part(rank);
      envelope->mutable_ready()->set_mirror_ready(true);
    });
  }
  void train(int64_t step) {
    all_say([&](int rank, proto::Envelope* envelope) {
      envelope->mutable_step_report()->set_generation(generation_);
      envelope->mutable_step_report()->set_rank(rank);
      envelope->mutable_step_report()->set_step(step);
      envelope->mutable_step_report()->set_step_s(1.0);
      envelope->mutable_step_report()->set_mirror_ready(true);
    });
    all_say([](int, proto::Envelope* envelope) { envelope->mutable_heartbeat(); });
  }
  void lose_one() {
    proto::Envelope envelope;
    envelope.mutable_process_exited()->set_role(proto::ROLE_WORKER);
    envelope.mutable_process_exited()->set_member_id(fmt::format("worker{:026}", kWorkers / 2));
    envelope.mutable_process_exited()->set_restart_in_s(-1);
    say(fmt::format("{:032}", kWorkers / 2 / kOnNode), envelope);
  }
  void halted(int64_t step) {
    all_say([&](int rank, proto::Envelope* envelope) {
      envelope->mutable_halted()->set_generation(generation_);
      for (const int part : {rank, (rank + kOnNode) % kWorkers}) {
        proto::Piece* piece = envelope->mutable_halted()->add_pieces();
        piece->set_generation(generation_);
        piece->set_world_size(kWorkers);
        piece->set_part(part);
        piece->set_step(step);
      }
    });
  }

  const spdlog::level::level_enum level_ = spdlog::get_level();
  TempDir dir_;
  Config config_;
  double now_ = 100.0;
  std::unique_ptr<RunLog> log_;
  std::unique_ptr<Session> session_;
  uint64_t generation_ = 0;
  std::optional<Message> assignment_;  // the newest
  std::set<const char*> encodings_;    // of it
  int64_t halts_ = 0, plans_ = 0, said_ = 0;
};

TEST_F(SessionScaleTest, StartsLosesOneAndGoesOn) {
  const double begin = cpu_seconds();
  join();
  ASSERT_EQ(session_->phase(), Phase::kStarting);
  EXPECT_EQ(encodings_.size(), 1u) << "one for each generation, not for each of its members";
  // An id and some bytes of each, and some more of each node.
  EXPECT_LT(assignment_->bytes().size(), size_t{64} * kWorkers);
  ready();
  ASSERT_EQ(session_->phase(), Phase::kTraining);
  EXPECT_EQ(plans_, kWorkers);
  const double steady = cpu_seconds();
  const int64_t said = said_;
  train(1);
  train(2);
  const double trained = (cpu_seconds() - steady) / static_cast<double>(said_ - said);
  EXPECT_EQ(session_->status(now_).step(), 2);
  lose_one();
  ASSERT_EQ(session_->phase(), Phase::kHalting);
  EXPECT_EQ(halts_, kWorkers - 1);
  halted(2);
  ASSERT_EQ(session_->phase(), Phase::kStarting);
  EXPECT_EQ(encodings_.size(), 1u);
  EXPECT_EQ(assignment_->envelope().assignment().world_size(), kWorkers - 1);
  EXPECT_EQ(assignment_->envelope().assignment().resume_step(), 2);
  ready();
  train(3);
  EXPECT_EQ(session_->status(now_).step(), 3);
  const double each = (cpu_seconds() - begin) / static_cast<double>(said_);
  RecordProperty("us_a_message", std::to_string(each * 1e6));
  RecordProperty("us_a_message_in_training", std::to_string(trained * 1e6));
  // Several times what it takes; a look at each member takes longer.
  if (kTimed) {
    EXPECT_LT(each, 40e-6) << said_ << " messages";
    EXPECT_LT(trained, 12e-6);
  }
}

}  // namespace
}  // namespace muster
