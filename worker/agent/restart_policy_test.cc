#include "worker/agent/restart_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

namespace muster {
namespace {

using testing::HasSubstr;

constexpr ExitStatus kKilled{.signalled = true, .code = SIGKILL};
constexpr ExitStatus kFailed{.signalled = false, .code = 1};
constexpr ExitStatus kLeft{.signalled = false, .code = 0};
constexpr double kShort = 1.0, kLong = 3600.0;  // lives

TEST(RestartPolicyTest, ACrashIsAnsweredByARestartSoon) {
  RestartPolicy policy({});
  const RestartDecision killed = policy.on_exit(10, 0, kKilled, kShort, "worker 0");
  EXPECT_DOUBLE_EQ(killed.start_at.value(), 10.1);
  EXPECT_EQ(killed.set_aside, "");
  EXPECT_DOUBLE_EQ(policy.on_exit(10, 1, kFailed, kShort, "worker 1").start_at.value(), 10.1);
  EXPECT_EQ(policy.open_at(10), 10);
}

TEST(RestartPolicyTest, WhoeverWasToldToLeaveStaysAway) {
  RestartPolicy policy({.restarts = 1});
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(policy.on_exit(i, 0, kLeft, kShort, "worker 0").start_at, std::nullopt);
  }
  // Nor does it count as a crash.
  EXPECT_EQ(policy.on_exit(6, 0, kKilled, kShort, "worker 0").set_aside, "");
}

TEST(RestartPolicyTest, NoRestartsIfNoneAreAllowed) {
  RestartPolicy policy({.restarts = 0});
  const RestartDecision decision = policy.on_exit(10, 0, kKilled, kLong, "worker 0");
  EXPECT_EQ(decision.start_at, std::nullopt);
  EXPECT_EQ(decision.set_aside, "");
  EXPECT_EQ(policy.open_at(10), 10);
}

TEST(RestartPolicyTest, TheWaitDoublesWithEachShortLifeUpToFiveSeconds) {
  RestartPolicy policy({.restarts = 100});
  double now = 0;
  for (const double wait : {0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0}) {
    now += 10;
    EXPECT_NEAR(policy.on_exit(now, 0, kKilled, kShort, "worker 0").start_at.value() - now, wait,
                1e-9);
  }
  // Each process for itself.
  EXPECT_NEAR(policy.on_exit(now, 1, kKilled, kShort, "worker 1").start_at.value() - now, 0.1,
              1e-9);
  // A long life makes up for it.
  EXPECT_NEAR(policy.on_exit(now, 0, kKilled, kLong, "worker 0").start_at.value() - now, 0.1, 1e-9);
  EXPECT_NEAR(policy.on_exit(now, 0, kKilled, kShort, "worker 0").start_at.value() - now, 0.2,
              1e-9);
}

TEST(RestartPolicyTest, MoreCrashesThanAllowedSetTheNodeAside) {
  RestartPolicy policy({.restarts = 2, .window_s = 100, .cool_down_s = 60});
  EXPECT_EQ(policy.on_exit(0, 0, kKilled, kShort, "worker 0").set_aside, "");
  EXPECT_EQ(policy.on_exit(10, 1, kKilled, kShort, "worker 1").set_aside, "");
  const RestartDecision third = policy.on_exit(20, 0, kKilled, kShort, "worker 0");
  EXPECT_EQ(third.set_aside,
            "worker 0 was killed by SIGKILL (9), crash 3 on its node within 20 s "
            "(elastic.restarts = 2): the node is set aside for 60.0 s");
  EXPECT_EQ(third.start_at, 80);
  EXPECT_EQ(policy.open_at(30), 80);
  // What ends meanwhile comes back with the others.
  const RestartDecision fourth = policy.on_exit(30, 1, kFailed, kShort, "worker 1");
  EXPECT_EQ(fourth.start_at, 80);
  EXPECT_EQ(fourth.set_aside,
            "worker 1 exited with status 1; its node is set aside for another 50.0 s");
  // Then it is judged afresh.
  EXPECT_EQ(policy.open_at(80), 80);
  const RestartDecision later = policy.on_exit(81, 0, kKilled, kShort, "worker 0");
  EXPECT_DOUBLE_EQ(later.start_at.value(), 81.1);
  EXPECT_EQ(later.set_aside, "");
  EXPECT_EQ(policy.on_exit(82, 0, kKilled, kShort, "worker 0").set_aside, "");
  EXPECT_THAT(policy.on_exit(83, 0, kKilled, kShort, "worker 0").set_aside, HasSubstr("crash 3"));
}

TEST(RestartPolicyTest, CrashesOutsideOfTheWindowAreForgotten) {
  RestartPolicy policy({.restarts = 1, .window_s = 100, .cool_down_s = 60});
  for (int i = 0; i < 10; ++i) {
    const double now = 101.0 * i;
    EXPECT_EQ(policy.on_exit(now, 0, kKilled, kLong, "worker 0").set_aside, "") << now;
  }
}

}  // namespace
}  // namespace muster
