// A coordinator that does no more than a data service needs, for the tests of the service.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include "common/config/config.h"
#include "common/transport/transport.h"
#include "data/testing.h"

namespace muster {

inline std::string random_endpoint() {
  std::random_device random;
  return "ipc://@muster-test-" + std::to_string(random()) + "-" + std::to_string(random());
}

// Welcomes, answers heartbeats, keeps the report. Its thread runs from start() to the end.
class FakeCoordinator {
 public:
  FakeCoordinator(const Config& config, Security security, double heartbeat_s = 0.2,
                  std::string endpoint = random_endpoint())
      : config_(to_toml(config)),
        security_(std::move(security)),
        heartbeat_s_(heartbeat_s),
        endpoint_(std::move(endpoint)) {}

  ~FakeCoordinator() { vanish(); }
  FakeCoordinator(const FakeCoordinator&) = delete;
  FakeCoordinator& operator=(const FakeCoordinator&) = delete;

  const std::string& endpoint() const { return endpoint_; }

  void start() {
    thread_ = std::jthread([this](const std::stop_token& stop) { serve(stop); });
  }
  // Goes away without a word, as after SIGKILL.
  void vanish() {
    thread_.request_stop();
    waker_.wake();
    thread_ = {};
  }
  void stop_service(bool ok) {
    {
      const std::lock_guard lock(mutex_);
      stop_ok_ = ok;
    }
    waker_.wake();
  }
  // The service's report; fails the test at the deadline.
  proto::DatasetReport report(Deadline deadline = soon()) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_until(lock, deadline.at(), [this] { return report_.has_value(); }));
    return report_.value_or(proto::DatasetReport());
  }
  bool saw_leaving(Deadline deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline.at(), [this] { return leaving_; });
  }
  int heartbeats(int at_least, Deadline deadline) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline.at(), [&] { return heartbeats_ >= at_least; });
    return heartbeats_;
  }

 private:
  void serve(const std::stop_token& stop) {
    Server server(endpoint_, security_);
    std::string service;
    while (!stop.stop_requested()) {
      auto received = server.receive(soon(), &waker_);
      waker_.clear();
      if (received) service = received->peer;
      if (received) answer(server, *received);
      const std::lock_guard lock(mutex_);
      if (stop_ok_ && !service.empty()) {
        proto::Envelope envelope;
        envelope.mutable_stop()->set_ok(*std::exchange(stop_ok_, std::nullopt));
        envelope.mutable_stop()->set_reason("the test is over");
        server.send(service, std::move(envelope));
      }
    }
  }
  void answer(Server& server, const Received& received) {
    proto::Envelope reply;
    reply.set_request_id(received.envelope.request_id());
    const std::lock_guard lock(mutex_);
    switch (received.envelope.body_case()) {
      case proto::Envelope::kHello:
        EXPECT_EQ(received.envelope.hello().role(), proto::ROLE_DATA);
        reply.mutable_welcome()->set_config_toml(config_);
        reply.mutable_welcome()->set_heartbeat_s(heartbeat_s_);
        break;
      case proto::Envelope::kHeartbeat:
        ++heartbeats_;
        reply.mutable_heartbeat();
        break;
      case proto::Envelope::kDatasetReport:
        report_ = received.envelope.dataset_report();
        break;
      case proto::Envelope::kLeaving:
        leaving_ = true;
        break;
      default:
        ADD_FAILURE() << "unexpected message";
    }
    changed_.notify_all();
    if (reply.body_case() != proto::Envelope::BODY_NOT_SET) {
      server.send(received.peer, std::move(reply));
    }
  }

  const std::string config_;
  const Security security_;
  const double heartbeat_s_;
  const std::string endpoint_;
  Waker waker_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::optional<proto::DatasetReport> report_;
  std::optional<bool> stop_ok_;
  bool leaving_ = false;
  int heartbeats_ = 0;
  std::jthread thread_;  // last
};

}  // namespace muster
