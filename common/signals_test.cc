#include "common/signals.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <chrono>
#include <csignal>

#include "common/process.h"
#include "common/transport/transport.h"

namespace muster {
namespace {

// Whether the waker fires within `wait`.
bool fires(const Waker& waker, std::chrono::milliseconds wait) {
  const Deadline deadline = Deadline::after(wait);
  while (true) {
    pollfd ready{.fd = waker.fd(), .events = POLLIN, .revents = 0};
    const int count = ::poll(&ready, 1, static_cast<int>(deadline.left().count()));
    if (count >= 0 || deadline.passed()) return count == 1;
  }
}

constexpr std::chrono::milliseconds kPatience(10000);

TEST(SignalsTest, CountsAndWakes) {
  Waker waker;
  const SignalWatch watch(waker);
  EXPECT_FALSE(fires(waker, std::chrono::milliseconds(0)));
  ::raise(SIGINT);
  EXPECT_TRUE(fires(waker, kPatience));
  ::raise(SIGINT);
  ::raise(SIGTERM);
  ::raise(SIGUSR1);
  EXPECT_EQ(watch.interrupts(), 2);
  EXPECT_EQ(watch.terminations(), 1);
  EXPECT_EQ(watch.user_signals(), 1);
}

TEST(SignalsTest, PutsTheFormerHandlersBack) {
  struct sigaction ours {};
  ours.sa_handler = SIG_IGN;
  struct sigaction original {};
  ::sigaction(SIGUSR1, &ours, &original);
  for (int round = 0; round < 2; ++round) {  // a second watch begins at zero
    Waker waker;
    const SignalWatch watch(waker);
    EXPECT_EQ(watch.user_signals(), 0);
    ::raise(SIGUSR1);
    EXPECT_EQ(watch.user_signals(), 1);
  }
  struct sigaction now {};
  ::sigaction(SIGUSR1, &original, &now);
  EXPECT_EQ(now.sa_handler, SIG_IGN);
}

TEST(SignalsTest, WakesWhenAChildEnds) {
  Waker waker;
  const SignalWatch watch(waker, /*children=*/true);
  Child child =
      Child::spawn({.name = "child", .argv = {"/bin/true"}, .environment = {}, .output_path = ""});
  EXPECT_TRUE(fires(waker, kPatience));
  EXPECT_TRUE(child.wait(Deadline::after(kPatience))->ok());
}

}  // namespace
}  // namespace muster
