#include "coordinator/membership.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace muster {
namespace {

using testing::HasSubstr;

const MembershipOptions kOptions{
    .expected_workers = 2, .join_timeout_s = 10, .heartbeat_s = 1, .global_batch = 8};

Member make(MemberRole role, const std::string& id, const std::string& node, int64_t arrival) {
  Member member;
  member.id = id;
  member.role = role;
  member.node_id = node;
  member.host = "host-" + node;
  member.pid = static_cast<int32_t>(100 + arrival);
  member.arrival = arrival;
  return member;
}

NodeDataset dataset(const std::string& node, const std::string& fingerprint = "f") {
  return {node, {fingerprint, 100, 10, 256}, "ipc://@" + node, ""};
}

// One node with an agent, a data service and two workers, all there.
MembershipState complete() {
  MembershipState state;
  state.members = {make(MemberRole::kNode, "n", "n", 0), make(MemberRole::kData, "d", "n", 1),
                   make(MemberRole::kWorker, "w0", "n", 2),
                   make(MemberRole::kWorker, "w1", "n", 3)};
  state.datasets = {dataset("n")};
  return state;
}

std::vector<std::string> assign_ranks(double now, const std::vector<std::string>& chosen,
                                      MembershipState* state) {
  std::vector<std::string> ids = rank_order(chosen, *state);
  give_ranks(now, ids, state);
  return ids;
}

TEST(DecideStartTest, StartsWhenAllAreHereAndAgree) {
  const Decision decision = decide_start(0, complete(), kOptions);
  EXPECT_EQ(decision.verdict, Verdict::kStart);
}

TEST(DecideStartTest, NamesWhoIsMissing) {
  MembershipState state = complete();
  state.members[0].workers = 2;
  state.members.pop_back();
  Decision decision = decide_start(1, state, kOptions);
  EXPECT_EQ(decision.verdict, Verdict::kWait);
  EXPECT_EQ(decision.reason, "1 of 2 workers have joined (host-n: 1 of 2)");

  state.datasets.clear();
  decision = decide_start(11, state, kOptions);
  EXPECT_EQ(decision.verdict, Verdict::kFault);
  EXPECT_THAT(decision.reason, HasSubstr("1 of 2 workers have joined"));
  EXPECT_THAT(decision.reason, HasSubstr("data service of host-n is still reading the sources"));

  state.members.erase(state.members.begin() + 1);
  EXPECT_THAT(decide_start(11, state, kOptions).reason,
              HasSubstr("data service of host-n has yet to join"));
}

TEST(DecideStartTest, NamesTheNodesAndHowManyWorkersOfEachAreHere) {
  MembershipOptions options = kOptions;
  options.expected_workers = 5;
  MembershipState state = complete();
  state.members[0].workers = 2;
  state.members.push_back(make(MemberRole::kNode, "m", "m", 4));
  state.members.back().workers = 2;
  EXPECT_EQ(
      decide_start(0, state, options).reason,
      "2 of 5 workers have joined (host-n: 2 of 2, host-m: 0 of 2); no node (muster node) has "
      "joined yet for 1 of them");
  EXPECT_EQ(decide_start(0, MembershipState{}, options).reason,
            "0 of 5 workers have joined; no node (muster node) has joined yet for 5 of them");
}

TEST(DecideStartTest, TheNodesSayHowManyWhereTheConfigDoesNot) {
  MembershipOptions options = kOptions;
  options.expected_workers = 0;
  MembershipState state;
  EXPECT_THAT(decide_start(0, state, options).reason, HasSubstr("node agent"));
  state = complete();
  state.members[0].workers = 3;
  EXPECT_EQ(decide_start(0, state, options).reason, "2 of 3 workers have joined (host-n: 2 of 3)");
  state.members[0].workers = 2;
  EXPECT_EQ(decide_start(0, state, options).verdict, Verdict::kStart);
}

TEST(DecideStartTest, BadDatasetsAreFaultsAtOnce) {
  MembershipState state = complete();
  state.members.pop_back();
  state.datasets[0].error = "/corpus: no such folder";
  Decision decision = decide_start(0, state, kOptions);
  EXPECT_EQ(decision.verdict, Verdict::kFault);
  EXPECT_THAT(decision.reason, HasSubstr("/corpus: no such folder"));

  state = complete();
  state.members.push_back(make(MemberRole::kNode, "m", "m", 4));
  state.datasets.push_back(dataset("m", "g"));
  decision = decide_start(0, state, kOptions);
  EXPECT_EQ(decision.verdict, Verdict::kFault);
  EXPECT_THAT(decision.reason, HasSubstr("host-n and host-m see different datasets"));

  state = complete();
  state.datasets[0].facts.train_samples = 7;
  decision = decide_start(0, state, kOptions);
  EXPECT_EQ(decision.verdict, Verdict::kFault);
  EXPECT_THAT(decision.reason, HasSubstr("7 training samples"));
}

TEST(DecideStartTest, WorkersOnCpuAndGpuDoNotMix) {
  MembershipState state = complete();
  state.members[2].device = "NVIDIA H200";
  state.members[3].device = "NVIDIA A100";
  EXPECT_EQ(decide_start(0, state, kOptions).verdict, Verdict::kStart);
  state.members[3].device = "cpu";
  const Decision decision = decide_start(0, state, kOptions);
  EXPECT_EQ(decision.verdict, Verdict::kFault);
  EXPECT_THAT(decision.reason,
              HasSubstr("no GPU that they can use: worker (pid 103 on host host-n); and these have "
                        "one: worker (pid 102 on host host-n): NVIDIA H200"));
  EXPECT_THAT(decision.reason, HasSubstr("set run.device = \"cpu\""));
  MembershipOptions cpu_only = kOptions;
  cpu_only.cpu_only = true;
  EXPECT_EQ(decide_start(0, state, cpu_only).verdict, Verdict::kStart);
  state.members[2].state = MemberState::kGone;
  state.members.push_back(make(MemberRole::kWorker, "w2", "n", 4));
  EXPECT_EQ(decide_start(0, state, kOptions).verdict, Verdict::kStart)
      << "only what is here counts";
}

TEST(DecideStartTest, MoreWorkersThanSamplesAreAFault) {
  MembershipOptions options = kOptions;
  options.expected_workers = 9;
  const Decision decision = decide_start(0, complete(), options);
  EXPECT_EQ(decision.verdict, Verdict::kFault);
  EXPECT_THAT(decision.reason, HasSubstr("9 workers, but train.global_batch is 8"));
}

TEST(DecideStartTest, WorkersThatDoNotFallIntoShardGroupsAreAFault) {
  MembershipOptions options = kOptions;
  options.expected_workers = 6;
  options.parallel.shard_group = 4;
  const Decision decision = decide_start(0, complete(), options);
  EXPECT_EQ(decision.verdict, Verdict::kFault);
  EXPECT_THAT(decision.reason, HasSubstr("parallel.shard_group: 4 does not divide the number of "
                                         "workers, 6"));
  options.parallel.shard_group = 3;
  EXPECT_EQ(decide_start(0, complete(), options).verdict, Verdict::kWait);
  options.expected_workers = 0;
  EXPECT_EQ(decide_start(0, MembershipState{}, options).verdict, Verdict::kWait)
      << "nobody is here yet";
}

TEST(PromoteTest, WorkersWaitForTheirNodesDataset) {
  MembershipState state = complete();
  state.members.push_back(make(MemberRole::kWorker, "w2", "other", 4));
  promote(7.0, &state);
  EXPECT_EQ(state.members[0].state, MemberState::kActive);
  EXPECT_EQ(state.members[2].state, MemberState::kStandby);
  EXPECT_EQ(state.members[2].standby_since, 7.0);
  EXPECT_EQ(state.members[4].state, MemberState::kJoining);
}

TEST(DecideAliveTest, SilenceBeyondFiveHeartbeatsIsAFault) {
  MembershipState state = complete();
  for (Member& member : state.members) member.last_heard = 100;
  state.members[3].rank = 1;
  EXPECT_EQ(decide_alive(105, state, kOptions).verdict, Verdict::kWait);
  for (size_t i = 0; i < 3; ++i) state.members[i].last_heard = 105;
  const Decision decision = decide_alive(105.5, state, kOptions);
  EXPECT_EQ(decision.verdict, Verdict::kFault);
  EXPECT_EQ(decision.reason, "worker 1 (pid 103 on host host-n) has been silent for 5.5 s");
  state.members[3].state = MemberState::kGone;
  EXPECT_EQ(decide_alive(105.5, state, kOptions).verdict, Verdict::kWait);
}

TEST(DecideAliveTest, ALostNodeIsBlamedForItsProcesses) {
  MembershipState state = complete();
  for (Member& member : state.members) member.last_heard = 100.5;
  state.members[2].last_heard = 100;  // the worker's patience runs out first
  EXPECT_THAT(decide_alive(105.2, state, kOptions).reason, HasSubstr("node agent (pid 100"));
}

TEST(DecideAliveTest, TwoMissedHeartbeatsAreSilence) {
  Member member = make(MemberRole::kWorker, "w0", "n", 0);
  member.last_heard = 100;
  EXPECT_FALSE(is_silent(102, member, kOptions));
  EXPECT_TRUE(is_silent(102.1, member, kOptions));
}

TEST(DecideAliveTest, ObserversMayComeAndGo) {
  MembershipState state;
  state.members = {make(MemberRole::kObserver, "o", "", 0)};
  EXPECT_EQ(decide_alive(1000, state, kOptions).verdict, Verdict::kWait);
}

TEST(RefuseTest, OnlyThoseWhoFitMayJoin) {
  MembershipState state = complete();
  const Member third = make(MemberRole::kWorker, "w2", "n", 9);
  EXPECT_FALSE(refuse_reason(state, kOptions, third, nullptr)) << "more than expected stand by";
  EXPECT_FALSE(refuse_reason(state, kOptions, make(MemberRole::kData, "d2", "n", 9), nullptr))
      << "it takes the place of the one before";
  EXPECT_THAT(
      refuse_reason(state, kOptions, make(MemberRole::kWorker, "", "n", 9), nullptr).value_or(""),
      HasSubstr("must name its id"));
  EXPECT_FALSE(refuse_reason(state, kOptions, state.members[2], &state.members[2]))
      << "a reconnection";
  EXPECT_THAT(
      refuse_reason(state, kOptions, make(MemberRole::kWorker, "w0", "n", 9), &state.members[2])
          .value_or(""),
      HasSubstr("belongs to worker"));
  state.members[2].state = MemberState::kGone;
  EXPECT_THAT(refuse_reason(state, kOptions, state.members[2], &state.members[2]).value_or(""),
              HasSubstr("already left"));
  state.running = true;
  EXPECT_FALSE(refuse_reason(state, kOptions, third, nullptr)) << "workers may join at any time";
  Member gpu = third;
  gpu.device = "NVIDIA H200";
  state.members[3].device = "cpu";
  EXPECT_THAT(refuse_reason(state, kOptions, gpu, nullptr).value_or(""),
              HasSubstr("cannot train together"));
  EXPECT_FALSE(refuse_reason(state, kOptions, make(MemberRole::kObserver, "o", "", 9), nullptr));
}

// Random clusters in random order: ranks are dense, unique, grouped by node, and the same for every
// permutation.
TEST(AssignRanksTest, AreDenseUniqueAndDeterministic) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const int nodes = 1 + static_cast<int>(random() % 4);
    const int workers = 1 + static_cast<int>(random() % 12);
    MembershipState state;
    for (int i = 0; i < workers; ++i) {
      Member member = make(MemberRole::kWorker, fmt::format("w{}", i),
                           fmt::format("n{}", random() % static_cast<unsigned>(nodes)), i);
      member.state = random() % 5 == 0 ? MemberState::kGone : MemberState::kStandby;
      state.members.push_back(member);
    }
    MembershipState shuffled = state;
    std::shuffle(shuffled.members.begin(), shuffled.members.end(), random);
    MembershipOptions options;
    options.global_batch = 100;
    assign_ranks(0.0, choose_workers(state, options), &state);
    assign_ranks(0.0, choose_workers(shuffled, options), &shuffled);

    std::vector<const Member*> by_rank;
    for (const Member& member : state.members) {
      if (member.state == MemberState::kGone) {
        EXPECT_EQ(member.rank, -1);
        continue;
      }
      EXPECT_EQ(member.state, MemberState::kActive);
      const auto other = std::find_if(shuffled.members.begin(), shuffled.members.end(),
                                      [&](const Member& m) { return m.id == member.id; });
      EXPECT_EQ(other->rank, member.rank);
      by_rank.push_back(&member);
    }
    std::sort(by_rank.begin(), by_rank.end(),
              [](const Member* a, const Member* b) { return a->rank < b->rank; });
    std::set<std::string> closed;
    for (size_t i = 0; i < by_rank.size(); ++i) {
      EXPECT_EQ(by_rank[i]->rank, static_cast<int32_t>(i));
      if (i == 0 || by_rank[i]->node_id == by_rank[i - 1]->node_id) continue;
      EXPECT_TRUE(closed.insert(by_rank[i - 1]->node_id).second) << "a node's ranks lie together";
    }
  }
}

// A run of two active workers, w0 and w1, at time 100.
MembershipState training() {
  MembershipState state = complete();
  state.running = true;
  promote(90.0, &state);
  assign_ranks(90.0, choose_workers(state, kOptions), &state);
  return state;
}

void join(MembershipState* state, const std::string& id, double now) {
  state->members.push_back(
      make(MemberRole::kWorker, id, "n", static_cast<int64_t>(state->members.size())));
  promote(now, state);
}

TEST(ResizeTest, JoinsWithinAWindowAreTakenInTogether) {
  MembershipOptions options = kOptions;
  options.join_window_s = 1.0;
  MembershipState state = training();
  EXPECT_FALSE(decide_resize(100, state, options));
  join(&state, "w2", 100.0);
  EXPECT_FALSE(decide_resize(100.5, state, options));
  join(&state, "w3", 100.9);
  EXPECT_FALSE(decide_resize(101.5, state, options)) << "w3 may not be the last";
  EXPECT_EQ(decide_resize(101.9, state, options).value_or(""), "2 more workers joined");
  // A steady trickle is not waited for without end.
  for (int i = 4; i < 8; ++i) join(&state, fmt::format("w{}", i), 100.0 + 0.9 * i);
  EXPECT_TRUE(decide_resize(106.5, state, options));
}

TEST(ResizeTest, ThoseAboveTheLimitStandBy) {
  MembershipOptions options = kOptions;
  options.max_workers = 2;
  MembershipState state = training();
  join(&state, "w2", 100.0);
  EXPECT_FALSE(decide_resize(200, state, options));
  state.members[2].state = MemberState::kGone;
  EXPECT_EQ(choose_workers(state, options), (std::vector<std::string>{"w1", "w2"}));
  options.max_workers = 0;
  state.target_workers = 1;
  EXPECT_EQ(choose_workers(state, options), std::vector<std::string>{"w1"});
}

TEST(ResizeTest, LeaversGoAtOnceAndAreReplacedByWhoStandsBy) {
  MembershipState state = training();
  state.members[3].state = MemberState::kDraining;
  EXPECT_EQ(decide_resize(100, state, kOptions).value_or(""),
            "worker 1 (pid 103 on host host-n) was asked to leave");
  join(&state, "w2", 100.0);
  const auto chosen = choose_workers(state, kOptions);
  EXPECT_EQ(chosen, (std::vector<std::string>{"w0", "w2"}));
  EXPECT_EQ(assign_ranks(100.0, chosen, &state), chosen);
  EXPECT_EQ(state.members[3].rank, -1);
  EXPECT_FALSE(decide_resize(100, state, kOptions)) << "it has been left out already";
}

TEST(ResizeTest, WhoHasNoPlaceInAShardGroupStandsBy) {
  MembershipOptions options = kOptions;
  options.parallel.shard_group = 2;
  MembershipState state = training();
  join(&state, "w2", 100.0);
  EXPECT_FALSE(decide_resize(200, state, options));
  join(&state, "w3", 200.0);
  EXPECT_EQ(decide_resize(300, state, options).value_or(""), "2 more workers joined");
  assign_ranks(300.0, choose_workers(state, options), &state);
  state.members[2].state = MemberState::kGone;
  assign_ranks(400.0, choose_workers(state, options), &state);
  EXPECT_EQ(state.members[3].state, MemberState::kActive);
  EXPECT_EQ(state.members[5].state, MemberState::kStandby);
  EXPECT_EQ(state.members[5].rank, -1);
}

TEST(ResizeTest, ARunOfFixedSizeEndsWithAWorker) {
  MembershipOptions options = kOptions;
  options.min_workers = 2;
  MembershipState state = training();
  EXPECT_FALSE(ends_without(state, options));
  state.members[2].state = MemberState::kGone;
  EXPECT_TRUE(ends_without(state, options));
  options.wait_timeout_s = 1.0;
  EXPECT_FALSE(ends_without(state, options)) << "it waits";
}

TEST(DescribeTest, NamesRankPidAndHost) {
  Member member = make(MemberRole::kWorker, "w", "n", 0);
  EXPECT_EQ(describe(member), "worker (pid 100 on host host-n)");
  member.rank = 1;
  EXPECT_EQ(describe(member), "worker 1 (pid 100 on host host-n)");
}

}  // namespace
}  // namespace muster
