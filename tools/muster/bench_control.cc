// What a worker waits for when it asks the coordinator something: one envelope there and one back
// over loopback, with and without encryption.
#include <stop_token>
#include <thread>

#include "common/transport/transport.h"
#include "tools/muster/bench.h"

namespace muster {
namespace {

constexpr int kWarmup = 200;
constexpr int kRepetitions = 2000;

// Sends every message back until it is asked to stop.
void echo(Server& server, const std::stop_token& stop) {
  Waker waker;
  const std::stop_callback wake(stop, [&] { waker.wake(); });
  while (!stop.stop_requested()) {
    auto received = server.receive(Deadline::after(std::chrono::seconds(1)), &waker);
    if (received) server.send(received->peer, received->envelope);
  }
}

double round_trip_s(const Security& security) {
  Server server("tcp://127.0.0.1:0", security);
  const std::jthread answering([&](const std::stop_token& stop) { echo(server, stop); });
  Client client(server.endpoint(), security, "the echo server");
  uint64_t request = 0;
  return median_seconds(kWarmup, kRepetitions, [&] {
    proto::Envelope envelope;
    envelope.set_request_id(++request);
    envelope.mutable_heartbeat();
    client.call(std::move(envelope), Deadline::after(std::chrono::seconds(5)));
  });
}

}  // namespace

std::vector<BenchResult> bench_control() {
  constexpr double kMicroseconds = 1e6;
  return {{"round trip, plain", round_trip_s({}) * kMicroseconds, "us", ""},
          {"round trip, encrypted", round_trip_s({generate_run_key()}) * kMicroseconds, "us", ""}};
}

}  // namespace muster
