#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <nlohmann/json.hpp>

#include "common/transport/transport.h"
#include "tools/muster/command.h"

namespace muster {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr std::chrono::seconds kPatience(10);

// A command's exit code and output, and what the coordinator was asked meanwhile.
struct Result {
  int code;
  std::string out;
  std::string err;
  std::vector<proto::Envelope> asked;
};

// Runs `muster NAME ENDPOINT REST…` against a coordinator that answers the requests with what
// `answers` put into the replies, one each.
Result run_against(std::vector<std::function<void(proto::Envelope*)>> answers, const char* name,
                   const Arguments& rest) {
  Server server("tcp://127.0.0.1:0", {});
  auto coordinator = std::async(std::launch::async, [&] {
    std::vector<proto::Envelope> asked;
    for (const auto& answer : answers) {
      const auto received = server.receive(Deadline::after(kPatience));
      if (!received) break;
      proto::Envelope reply;
      reply.set_request_id(received->envelope.request_id());
      answer(&reply);
      server.send(received->peer, reply);
      asked.push_back(received->envelope);
    }
    return asked;
  });
  Arguments arguments = {name, server.endpoint()};
  arguments.insert(arguments.end(), rest.begin(), rest.end());
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const int code = run_muster(arguments);
  std::fflush(stdout);
  return {code, testing::internal::GetCapturedStdout(), testing::internal::GetCapturedStderr(),
          coordinator.get()};
}

proto::MemberStatus* add_worker(proto::Status* status, const std::string& id, int rank,
                                const std::string& state) {
  proto::MemberStatus* member = status->add_members();
  member->set_role(proto::ROLE_WORKER);
  member->set_member_id(id);
  member->set_rank(rank);
  member->set_state(state);
  member->set_host("n1");
  return member;
}

void three_workers(proto::Envelope* reply) {
  proto::Status* status = reply->mutable_status();
  status->set_phase("training");
  status->set_generation(4);
  status->set_total_steps(100);
  status->set_target_workers(4);
  status->set_min_workers(2);
  status->set_goodput(0.9825);
  status->set_pause_s(0.42);
  status->set_paused_total_s(1.3);
  status->set_redone_steps(1);
  add_worker(status, "old", 1, "gone");
  add_worker(status, "a", 0, "active");
  proto::MemberStatus* slow = add_worker(status, "b", 1, "active");
  slow->set_step_s(1.5);
  slow->set_wait_s(0.25);
  slow->set_slow(true);
  add_worker(status, "c", -1, "standby");
}

void accept(proto::Envelope* reply) {
  reply->mutable_accepted()->set_what("from 2 to 3 workers");
}
void refuse(proto::Envelope* reply) {
  reply->mutable_refused()->set_reason("7 is no worker's rank");
}

TEST(ScaleTest, AsksAndPrintsTheAnswer) {
  const Result result = run_against({accept}, "scale", {"--workers", "3"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.asked.at(0).scale_request().workers(), 3);
  EXPECT_THAT(result.out, HasSubstr(": from 2 to 3 workers\n"));
}

TEST(ScaleTest, ARefusalIsAFailure) {
  const Result result = run_against({refuse}, "scale", {"--workers", "3"});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, StartsWith("muster scale: "));
  EXPECT_THAT(result.err, HasSubstr("7 is no worker's rank"));
}

TEST(ScaleTest, SaysHowManyMayBeAskedFor) {
  const Result none = run_against({}, "scale", {});
  EXPECT_EQ(none.code, 2);
  EXPECT_THAT(none.err, HasSubstr("--workers is missing"));
  const Result zero = run_against({}, "scale", {"--workers", "0"});
  EXPECT_EQ(zero.code, 2);
  EXPECT_THAT(zero.err, HasSubstr("--workers 0: must be at least 1"));
}

TEST(DrainTest, RanksAreTheOnesThatTheUserSaw) {
  const Result result = run_against({three_workers, accept, accept, accept}, "drain",
                                    {"1", "n2", "0", "--reason", "maintenance"});
  EXPECT_EQ(result.code, 0) << result.err;
  ASSERT_EQ(result.asked.size(), 4U);
  std::vector<std::string> who;
  for (size_t i = 1; i < result.asked.size(); ++i) {
    who.push_back(result.asked[i].drain_request().who());
    EXPECT_EQ(result.asked[i].drain_request().reason(), "maintenance");
  }
  EXPECT_THAT(who, ElementsAre("b", "n2", "a"));
  EXPECT_THAT(result.out, HasSubstr("leaving: "));
}

TEST(DrainTest, WhatWasAcceptedBeforeARefusalIsTold) {
  const Result result = run_against({three_workers, accept, refuse}, "drain", {"0", "7"});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.out, HasSubstr("leaving: "));
  EXPECT_THAT(result.err, HasSubstr("7 is no worker's rank"));
  EXPECT_EQ(run_against({}, "drain", {}).code, 2);
}

TEST(StopTest, AsksOnce) {
  const Result result = run_against({accept}, "stop", {"--now"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_TRUE(result.asked.at(0).stop_request().immediately());
}

TEST(StatusTest, TellsWorkersPausesAndGoodput) {
  const Result result = run_against({three_workers}, "status", {});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("generation 4"));
  EXPECT_THAT(result.out, HasSubstr("workers: 2 active, 1 standby; 4 wanted; at least 2\n"));
  EXPECT_THAT(result.out, HasSubstr("goodput: 98.2 % of the time went into steps that count; "
                                    "paused 0.42 s at the last change of generation, 1.30 s in "
                                    "all; 1 step done twice\n"));
  EXPECT_THAT(result.out, HasSubstr("active slow"));
  EXPECT_THAT(result.out, HasSubstr("1.50 s    0.25 s  b\n"));
  EXPECT_THAT(result.out, Not(HasSubstr("old")));
  EXPECT_THAT(result.out, HasSubstr("1 more is gone\n"));
}

TEST(StatusTest, TellsProgramsTheSame) {
  const Result result = run_against({three_workers}, "status", {"--json"});
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json.at("workers"), 2);
  EXPECT_EQ(json.at("target_workers"), 4);
  EXPECT_EQ(json.at("min_workers"), 2);
  EXPECT_EQ(json.at("pause_s"), 0.42);
  EXPECT_EQ(json.at("paused_total_s"), 1.3);
  EXPECT_EQ(json.at("goodput"), 0.9825);
  EXPECT_EQ(json.at("redone_steps"), 1);
  EXPECT_EQ(json.at("members").size(), 4U);
  EXPECT_EQ(json.at("members").at(2).at("slow"), true);
  EXPECT_EQ(json.at("members").at(2).at("wait_s"), 0.25);
}

}  // namespace
}  // namespace muster
