#include "worker/comm/interrupt.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "common/error.h"
#include "worker/comm/gloo_mesh.h"
#include "worker/comm/testing.h"

namespace muster {
namespace {

TEST(Interrupt, RunsWhatIsRegisteredOnceAndTellsTheFirstReason) {
  const auto interrupt = Interrupt::make();
  int calls = 0;
  const auto one = interrupt->on_fire([&](const std::string&) { ++calls; });
  {
    const auto gone = interrupt->on_fire([&](const std::string&) { calls += 100; });
  }
  EXPECT_NO_THROW(interrupt->check());
  interrupt->fire("first");
  interrupt->fire("second");
  EXPECT_EQ(calls, 1);
  std::string late;
  const auto after = interrupt->on_fire([&](const std::string& reason) { late = reason; });
  EXPECT_EQ(late, "first");
  EXPECT_THROW(interrupt->check(), PeerError);
}

TEST(Interrupt, EndsAnExchange) {
  const auto interrupt = Interrupt::make();
  std::atomic<int> waiting{0};
  const auto make = [&](CommunicatorOptions options, Store& store) {
    options.interrupt = interrupt;
    return std::make_unique<GlooMesh>(options, store);
  };
  const auto body = [&](GlooMesh& mesh) {
    char byte = 0;
    Exchange exchange(mesh, "test");
    if (mesh.rank() == 0) exchange.receive(1, &byte, 1);
    exchange.start();
    if (++waiting == 2) interrupt->fire("the run is over");
    exchange.finish(Deadline::after(std::chrono::seconds(20)));
    mesh.check_alive();
  };
  try {
    testing::run_ranks_of(2, make, body);
    FAIL() << "nothing was sent";
  } catch (const PeerError& error) {
    EXPECT_STREQ(error.what(), "the run is over");
  }
}

}  // namespace
}  // namespace muster
