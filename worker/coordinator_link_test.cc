#include "worker/coordinator_link.h"

#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <initializer_list>
#include <memory>
#include <random>
#include <thread>

#include "common/transport/transport.h"
#include "worker/comm/interrupt.h"

namespace muster {
namespace {

Deadline soon() {
  return Deadline::after(std::chrono::seconds(20));
}

std::string random_endpoint() {
  std::random_device random;
  return "ipc://@muster-test-" + std::to_string(random()) + "-" + std::to_string(random());
}

// A coordinator that welcomes one worker and says what the test wants it to.
class CoordinatorLinkTest : public ::testing::Test {
 protected:
  explicit CoordinatorLinkTest(double patience_s = 0.0) {
    auto linked = std::async(std::launch::async, [this] {
      proto::Hello hello;
      hello.set_role(proto::ROLE_WORKER);
      hello.set_member_id("worker");
      link_ =
          std::make_unique<CoordinatorLink>(server_.endpoint(), Security{}, hello, false, soon());
    });
    const auto hello = server_.receive(soon());
    worker_ = hello.value().peer;
    proto::Envelope welcome;
    welcome.set_request_id(hello->envelope.request_id());
    welcome.mutable_welcome()->set_heartbeat_s(20.0);
    welcome.mutable_welcome()->set_patience_s(patience_s);
    server_.send(worker_, welcome);
    linked.get();
  }

  void say(const std::function<void(proto::Envelope&)>& fill) {
    proto::Envelope envelope;
    fill(envelope);
    EXPECT_TRUE(server_.send(worker_, envelope));
  }
  void assign(uint64_t generation, const std::string& data = "data") {
    say([&](proto::Envelope& envelope) {
      envelope.mutable_assignment()->set_generation(generation);
      envelope.mutable_assignment()->add_nodes()->set_data_endpoint(data);
      envelope.mutable_assignment()->add_members()->set_member_id("worker");
    });
  }
  // While `trains` goes on.
  void prepare(uint64_t generation, uint64_t trains) {
    say([&](proto::Envelope& envelope) {
      envelope.mutable_assignment()->set_generation(generation);
      envelope.mutable_assignment()->set_prepare(true);
      envelope.mutable_assignment()->mutable_handover()->set_generation(trains);
    });
  }
  void go_over(uint64_t generation, int64_t step) {
    say([&](proto::Envelope& envelope) {
      envelope.mutable_go_over()->set_generation(generation);
      envelope.mutable_go_over()->set_resume_step(step);
    });
  }
  void plan(uint64_t generation, std::initializer_list<int64_t> steps) {
    say([&](proto::Envelope& envelope) {
      envelope.mutable_step_plan()->set_generation(generation);
      for (const int64_t step : steps) envelope.mutable_step_plan()->add_steps()->set_step(step);
    });
  }
  void halt(uint64_t generation) {
    say([&](proto::Envelope& envelope) {
      envelope.mutable_halt()->set_generation(generation);
      envelope.mutable_halt()->set_reason("worker 1 is gone");
    });
  }
  void stop() {
    say([](proto::Envelope& envelope) {
      envelope.mutable_stop()->set_ok(true);
      envelope.mutable_stop()->set_reason("finished");
    });
  }
  // All that was said has been taken in: a value comes behind it.
  void settle() {
    auto got = std::async(std::launch::async, [&] { return link_->get("settle", soon()); });
    while (true) {
      const auto received = server_.receive(soon());
      ASSERT_TRUE(received);
      if (received->envelope.has_store_get()) break;
    }
    say([](proto::Envelope& envelope) { envelope.mutable_store_value()->set_key("settle"); });
    got.get();
  }

  Server server_{random_endpoint(), Security{}};
  std::string worker_;
  std::unique_ptr<CoordinatorLink> link_;
};

TEST_F(CoordinatorLinkTest, StepsThatWerePlannedBeforeANewAssignmentComeBeforeIt) {
  assign(1);
  EXPECT_EQ(link_->next_assignment()->generation(), 1u);
  plan(1, {1, 2});
  assign(2);
  plan(2, {3});
  settle();
  EXPECT_TRUE(link_->assignment_waits());
  EXPECT_EQ(link_->next_step(1)->step(), 1);
  EXPECT_EQ(link_->poll_step(1)->step(), 2);
  EXPECT_FALSE(link_->poll_step(1));
  EXPECT_FALSE(link_->next_step(1)) << "a newer generation waits";
  EXPECT_EQ(link_->next_assignment()->generation(), 2u);
  EXPECT_FALSE(link_->next_step(1)) << "also when it was taken";
  EXPECT_EQ(link_->next_step(2)->step(), 3);
}

TEST_F(CoordinatorLinkTest, StepsGoOnWhileAGenerationIsPrepared) {
  assign(1);
  EXPECT_TRUE(link_->next_assignment());
  prepare(2, 1);
  settle();
  EXPECT_FALSE(link_->next_step(1)) << "there is something to do";
  EXPECT_EQ(link_->next_assignment()->generation(), 2u);
  plan(1, {1});
  EXPECT_EQ(link_->next_step(1)->step(), 1);
  EXPECT_FALSE(link_->is_left(1));
  plan(1, {2});
  go_over(2, 2);
  settle();
  EXPECT_TRUE(link_->is_left(1));
  EXPECT_EQ(link_->next_step(1)->step(), 2) << "what was handed out before is trained";
  EXPECT_FALSE(link_->next_step(1));
  EXPECT_EQ(link_->go_over(2), 2);
}

TEST_F(CoordinatorLinkTest, APreparedGenerationMayBeReplaced) {
  assign(1);
  EXPECT_TRUE(link_->next_assignment());
  prepare(2, 1);
  settle();
  EXPECT_TRUE(link_->next_assignment());
  const auto training = Interrupt::make();
  const auto first = Interrupt::make();
  link_->interrupt_on_halt(1, training);
  link_->interrupt_on_halt(2, first);
  auto waiting = std::async(std::launch::async, [&] { return link_->go_over(2); });
  prepare(3, 1);
  EXPECT_THROW(waiting.get(), Halted);
  settle();
  EXPECT_TRUE(link_->replaced(2));
  EXPECT_FALSE(link_->halted(2));
  EXPECT_THROW(first->check(), PeerError);
  training->check();
  const auto late = Interrupt::make();
  link_->interrupt_on_halt(2, late);
  EXPECT_THROW(late->check(), PeerError);
  go_over(3, 7);
  EXPECT_EQ(link_->go_over(3), 7);
  EXPECT_FALSE(link_->replaced(3));
}

// One that was in a generation that never began, and in none of those that trained since.
TEST_F(CoordinatorLinkTest, WhoMissedAGenerationLeavesTheOneBefore) {
  prepare(2, 1);
  settle();
  EXPECT_TRUE(link_->next_assignment());
  auto waiting = std::async(std::launch::async, [&] { return link_->go_over(2); });
  prepare(4, 3);
  EXPECT_THROW(waiting.get(), Halted);
  EXPECT_EQ(link_->next_assignment()->generation(), 4u);
}

TEST_F(CoordinatorLinkTest, OnlyTheNewestAssignmentCounts) {
  assign(1);
  assign(2);
  settle();
  EXPECT_EQ(link_->next_assignment()->generation(), 2u);
  EXPECT_FALSE(link_->assignment_waits());
}

// Waits end before interrupts fire, but not by much.
bool fires(const std::shared_ptr<Interrupt>& interrupt) {
  const auto fired = std::make_shared<std::promise<void>>();
  const auto handle = interrupt->on_fire([fired](const std::string&) { fired->set_value(); });
  return fired->get_future().wait_until(soon().at()) == std::future_status::ready;
}

TEST_F(CoordinatorLinkTest, AHaltEndsWhatBelongsToItsGenerationAndOlderOnes) {
  const auto interrupt = Interrupt::make();
  const auto later = Interrupt::make();
  link_->interrupt_on_halt(2, interrupt);
  link_->interrupt_on_halt(3, later);
  assign(2);
  EXPECT_TRUE(link_->next_assignment());
  auto step = std::async(std::launch::async, [&] { return link_->next_step(2); });
  auto value = std::async(std::launch::async, [&] { return link_->get("2/gloo/0", soon()); });
  auto other = std::async(std::launch::async, [&] { return link_->get("3/gloo/0", soon()); });
  plan(1, {7});
  halt(2);
  EXPECT_THROW(step.get(), Halted);
  EXPECT_THROW(value.get(), Halted);
  link_->wait_for_halt(2, soon());
  EXPECT_TRUE(link_->halted(1));
  EXPECT_FALSE(link_->halted(3));
  EXPECT_EQ(other.wait_for(std::chrono::milliseconds(0)), std::future_status::timeout);
  EXPECT_TRUE(fires(interrupt));
  stop();
  EXPECT_THROW(other.get(), RunEnded);
  EXPECT_TRUE(fires(later)) << "by the end of the run";
}

TEST_F(CoordinatorLinkTest, AHaltIsGivenOutOnceAndTakesItsAssignmentAlong) {
  assign(1);
  halt(1);
  settle();
  EXPECT_FALSE(link_->assignment_waits());
  EXPECT_FALSE(link_->next_assignment()) << "a halt is to be answered first";
  EXPECT_EQ(link_->take_halt(), 1u);
  EXPECT_EQ(link_->take_halt(), std::nullopt);
  assign(1);
  assign(2);
  EXPECT_EQ(link_->next_assignment()->generation(), 2u);
  const auto interrupt = Interrupt::make();
  link_->interrupt_on_halt(1, interrupt);
  EXPECT_THROW(interrupt->check(), PeerError) << "it is over already";
}

TEST_F(CoordinatorLinkTest, GivingUpAGenerationEndsItsWaitsAlone) {
  auto value = std::async(std::launch::async, [&] { return link_->get("2/gloo/0", soon()); });
  link_->give_up(2, "not joined");
  EXPECT_THROW(value.get(), Halted);
  EXPECT_FALSE(link_->halted(2));
  plan(1, {1});
  assign(1);
  EXPECT_EQ(link_->next_assignment()->generation(), 1u);
  EXPECT_EQ(link_->next_step(1)->step(), 1);
}

TEST_F(CoordinatorLinkTest, KnowsWhereTheDataServiceHasMovedTo) {
  assign(1, "first");
  link_->next_assignment();
  EXPECT_EQ(link_->data_endpoint(), "first");
  EXPECT_EQ(link_->data_endpoint_after("", 1, soon()), "first");
  auto moved = std::async(std::launch::async,
                          [&] { return link_->data_endpoint_after("first", 1, soon()); });
  say([](proto::Envelope& envelope) { envelope.mutable_data_moved()->set_endpoint("second"); });
  EXPECT_EQ(moved.get(), "second");
}

class SilentCoordinator : public CoordinatorLinkTest {
 protected:
  SilentCoordinator() : CoordinatorLinkTest(/*patience_s=*/0.5) {}
};

TEST_F(SilentCoordinator, IsOutlastedByThePlannedStepsAlone) {
  const auto training = Interrupt::make();
  const auto joining = Interrupt::make();
  link_->interrupt_on_halt(1, training);
  link_->interrupt_on_halt(2, joining);
  std::promise<void> interrupted;
  const auto handle = joining->on_fire([&](const std::string&) { interrupted.set_value(); });
  link_->outlast_coordinator(1);
  assign(1);
  EXPECT_TRUE(link_->next_assignment());
  plan(1, {1, 2});
  EXPECT_EQ(link_->next_step(1)->step(), 1);
  EXPECT_THROW(link_->wait_for_end(soon()), CoordinatorGone);
  EXPECT_TRUE(link_->coordinator_silent());
  EXPECT_EQ(link_->next_step(1)->step(), 2);
  EXPECT_THROW(link_->next_step(1), CoordinatorGone);
  EXPECT_THROW(link_->next_assignment(), CoordinatorGone);
  EXPECT_THROW(link_->wait_for_halt(1, soon()), CoordinatorGone);
  EXPECT_THROW(link_->data_endpoint_after("data", 1, soon()), CoordinatorGone);
  interrupted.get_future().wait();
  EXPECT_NO_THROW(training->check());
}

TEST_F(SilentCoordinator, IsNoNewsAfterTheEndOfTheRun) {
  stop();
  EXPECT_THROW(link_->wait_for_end(soon()), RunEnded);
  EXPECT_FALSE(link_->coordinator_silent());
  while (!link_->coordinator_silent()) std::this_thread::yield();
  try {
    link_->wait_for_end(soon());
  } catch (const CoordinatorGone& gone) {
    FAIL() << gone.what();
  } catch (const RunEnded&) {
  }
}

}  // namespace
}  // namespace muster
