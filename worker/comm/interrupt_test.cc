#include "worker/comm/interrupt.h"

#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gtest/gtest.h>

#include <future>
#include <memory>

#include "common/error.h"
#include "worker/comm/gloo_mesh.h"
#include "worker/comm/testing.h"

namespace muster {
namespace {

using testing::InMemoryStore;

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

// The peer has published where it listens and never connects.
TEST(Interrupt, EndsARendezvousThatWaitsForAConnection) {
  InMemoryStore store;
  const auto interrupt = Interrupt::make();
  CommunicatorOptions options;
  options.world_size = 2;
  options.timeout_s = 60.0;
  options.interrupt = interrupt;
  // Outlives the other end: Gloo ends the process when one that it has just accepted is gone again.
  std::unique_ptr<GlooMesh> connected;
  auto meeting =
      std::async(std::launch::async, [&] { return std::make_unique<GlooMesh>(options, store); });
  const Deadline soon = Deadline::after(std::chrono::seconds(20));
  const auto device = gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr("127.0.0.1"));
  const auto context = device->createContext(1, 2);
  const std::vector<char> address = context->createPair(0)->address().bytes();
  std::string published(address.begin(), address.end());
  published.resize(2 * address.size());
  store.set("gloo/1", published);
  store.get("gloo/0", soon);
  // Which side calls the other is Gloo's choice, by their addresses.
  if (meeting.wait_for(std::chrono::milliseconds(50)) == std::future_status::ready) {
    GTEST_SKIP() << "this time the mesh is the one that connects";
  }
  interrupt->fire("the run is over");
  ASSERT_EQ(meeting.wait_for(std::chrono::seconds(5)), std::future_status::ready);
  try {
    connected = meeting.get();
    GTEST_SKIP() << "the mesh was the one that connects, if late";
  } catch (const PeerError& error) {
    EXPECT_STREQ(error.what(), "the run is over");
  }
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
