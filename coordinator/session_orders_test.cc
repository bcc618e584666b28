// Orders for another size, and that the size asked for is kept.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "common/error.h"
#include "coordinator/change_testing.h"

namespace muster {
namespace {

// Workers w0 and w1 on one node, w2 and w3 on another.
class OrdersTest : public ChangeTest {
 protected:
  OrdersTest() {
    start(4);
    for (const std::string node : {"a", "b"}) {
      hello(node, proto::ROLE_NODE, 2, "id-" + node);
      hello("data-" + node, proto::ROLE_DATA, 0, "id-" + node);
      say("data-" + node, dataset());
    }
    join("w0", "a");
    join("w1", "a");
    join("w2", "b");
    join("w3", "b");
    for (const std::string worker : {"w0", "w1", "w2", "w3"}) ready(worker);
    EXPECT_EQ(session_->phase(), Phase::kTraining);
  }
  void join(const std::string& worker, const std::string& node) {
    hello(worker, proto::ROLE_WORKER, 0, "id-" + node);
  }
  // What the node is asked to start.
  int started_on(const std::string& node) {
    int count = 0;
    for (const auto& envelope : take(node, proto::Envelope::kStartWorkers)) {
      count += envelope.start_workers().count();
    }
    return count;
  }
  void exited(const std::string& node, const std::string& worker, double restart_in_s,
              const std::string& no_restart = "") {
    proto::Envelope envelope;
    auto* exit = envelope.mutable_process_exited();
    exit->set_role(proto::ROLE_WORKER);
    exit->set_member_id("id-" + worker);
    exit->set_signalled(true);
    exit->set_code(9);
    exit->set_restart_in_s(restart_in_s);
    exit->set_no_restart(no_restart);
    if (restart_in_s < 0) --load_[node];
    exit->mutable_load()->set_workers(load_[node]);
    say(node, envelope);
  }
  std::map<std::string, int> load_ = {{"a", 2}, {"b", 2}};  // workers that run, or will again

  // w1 leaves: three are wanted from here on, and its node could have it again.
  void make_room() {
    session_->scale(4, now_);
    session_->drain("id-w1", "", now_);
    tick();
    const int64_t last = train_planned(1, {"w0", "w1", "w2", "w3"}, 1);
    for (const std::string worker : {"w0", "w2", "w3"}) ready(worker);
    ASSERT_EQ(session_->phase(), Phase::kTraining);
    train_planned(2, {"w0", "w2", "w3"}, last + 1);
    ASSERT_EQ(take("w1", proto::Envelope::kStop).size(), 1u);
    EXPECT_EQ(started_on("a") + started_on("b"), 0);
  }
  // What was handed out, from `step` on; the last of it.
  int64_t train_planned(uint64_t generation, const std::vector<std::string>& workers,
                        int64_t step) {
    const int64_t last = planned("w0").back().step();
    for (; step <= last; ++step) {
      for (size_t rank = 0; rank < workers.size(); ++rank) {
        report_from(workers[rank], generation, static_cast<int>(rank), step);
      }
    }
    return last;
  }
  void leaves(const std::string& node) {
    proto::Envelope envelope;
    envelope.mutable_leaving()->set_reason("SIGTERM");
    say(node, envelope);
  }
};

TEST_F(OrdersTest, ScalingSendsTheYoungestAway) {
  EXPECT_EQ(session_->scale(2, now_), "from 4 to 2 workers");
  tick();
  EXPECT_EQ(ranks_["w1"], 1);
  EXPECT_EQ(ranks_["w2"], -1);
  EXPECT_EQ(ranks_["w3"], -1);
  EXPECT_THROW(session_->scale(0, now_), ConfigError);
  EXPECT_THROW(session_->scale(5, now_), ConfigError) << "the batch has 4 samples";
  EXPECT_THROW(session_->drain("w9", "", now_), ConfigError);
}

TEST_F(OrdersTest, WorkersThatAreOnTheirWayAreNotStartedTwice) {
  session_->scale(1, now_);
  EXPECT_EQ(session_->scale(3, now_), "from 1 to 3 workers");
  EXPECT_EQ(started_on("a") + started_on("b"), 2);
  EXPECT_EQ(session_->scale(4, now_), "from 1 to 4 workers");
  EXPECT_EQ(started_on("a") + started_on("b"), 1);
  join("w4", "a");
  session_->scale(4, now_);
  EXPECT_EQ(started_on("a") + started_on("b"), 0);
}

TEST_F(OrdersTest, ALostNodesWorkersAreStartedWhereThereIsRoom) {
  make_room();
  for (int i = 0; i < 7; ++i) {
    now_ += 1;
    beat({"a", "data-a", "w0"});
    tick();
  }
  EXPECT_FALSE(session_->outcome());
  EXPECT_EQ(started_on("a"), 1) << "two are wanted, and it brought one more than it has";
}

TEST_F(OrdersTest, ALeavingNodesWorkersAreStartedWhereThereIsRoom) {
  make_room();
  leaves("b");
  EXPECT_EQ(started_on("a"), 1);
  EXPECT_EQ(started_on("b"), 0);
}

TEST_F(OrdersTest, WhoIsNotStartedAnewIsStartedElsewhere) {
  make_room();
  exited("b", "w2", 0.1);
  EXPECT_EQ(started_on("a"), 0) << "its own node does";
  exited("b", "w3", -1, "too many crashes");
  EXPECT_EQ(started_on("a"), 1);
  EXPECT_EQ(started_on("b"), 0) << "it is set aside";
}

TEST_F(OrdersTest, WhatIsOnItsWayAndNotNeededAnyMoreIsTurnedAway) {
  session_->scale(1, now_);
  session_->scale(4, now_);
  const std::map<std::string, int> started = {{"a", started_on("a")}, {"b", started_on("b")}};
  EXPECT_EQ(started.at("a") + started.at("b"), 3);
  session_->scale(2, now_);
  size_t turned_away = 0;
  for (const auto& [node, count] : started) {
    for (int i = 0; i < count; ++i) {
      const std::string worker = "new" + std::to_string(i) + node;
      join(worker, node);
      turned_away += take(worker, proto::Envelope::kStop).size();
    }
  }
  EXPECT_EQ(turned_away, 2u);
}

TEST_F(OrdersTest, ALeaverThatCrashesDoesNotComeBack) {
  session_->drain("id-w3", "", now_);
  exited("b", "w3", 0.1);
  join("w4", "b");
  EXPECT_EQ(take("w4", proto::Envelope::kStop).size(), 1u);
  join("w5", "b");
  EXPECT_TRUE(take("w5", proto::Envelope::kStop).empty()) << "one for one";
  leaves("b");
  join("w6", "b");
  EXPECT_EQ(take("w6", proto::Envelope::kStop).size(), 1u) << "the whole node goes";
}

TEST_F(OrdersTest, WhatTheAgentSaysOfItsWorkersCounts) {
  session_->scale(1, now_);
  session_->scale(2, now_);
  EXPECT_EQ(started_on("a") + started_on("b"), 1);
  // None came of it: the nodes have those that leave, and nothing else.
  for (const std::string node : {"a", "b"}) {
    proto::Envelope beat;
    beat.mutable_heartbeat()->mutable_load()->set_workers(2);
    beat.mutable_heartbeat()->mutable_load()->set_asked(1);
    say(node, beat);
  }
  session_->scale(2, now_);
  EXPECT_EQ(started_on("a") + started_on("b"), 1);
}

TEST_F(OrdersTest, ARefusedSizeChangesNothing) {
  session_->scale(3, now_);
  EXPECT_THROW(session_->scale(5, now_), ConfigError);
  EXPECT_EQ(session_->status(now_).target_workers(), 3);
}

TEST_F(OrdersTest, ASizeOutlivesTheCoordinatorThatAcceptedIt) {
  session_->scale(3, now_);
  start(4);
  ASSERT_TRUE(session_->restore(now_));
  EXPECT_EQ(session_->status(now_).target_workers(), 3);
}

TEST_F(OrdersTest, WithoutAnOrderNobodyIsStartedElsewhere) {
  exited("b", "w3", -1);
  leaves("b");
  EXPECT_EQ(started_on("a") + started_on("b"), 0);
}

}  // namespace
}  // namespace muster
