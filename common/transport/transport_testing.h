// What the tests of this folder share.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>

#include "common/error.h"
#include "common/transport/transport.h"

namespace muster {

inline Deadline soon() {
  return Deadline::after(std::chrono::duration<double>(10));
}
inline Deadline briefly() {
  return Deadline::after(std::chrono::duration<double>(0.05));
}

inline proto::Envelope heartbeat() {
  proto::Envelope envelope;
  envelope.mutable_heartbeat();
  return envelope;
}

inline proto::Envelope status_request() {
  proto::Envelope envelope;
  envelope.mutable_status_request();
  return envelope;
}

// The message of the error that `action` throws.
template <typename Expected, typename Action>
std::string error_of(Action action) {
  try {
    action();
  } catch (const Expected& e) {
    return e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "wrong kind of error: " << e.what();
    return "";
  }
  ADD_FAILURE() << "no error";
  return "";
}

inline int port_of(const std::string& endpoint) {
  return std::stoi(endpoint.substr(endpoint.rfind(':') + 1));
}

// Serves in a thread until the test is over: a client's handshake failures need a server that reads
// its events.
class Serving {
 public:
  explicit Serving(Server* server)
      : thread_([this, server] {
          while (!stop_) {
            auto received = server->receive(soon(), &waker_);
            if (!received) continue;
            proto::Envelope reply = received->envelope;
            server->send(received->peer, std::move(reply));
          }
        }) {}
  ~Serving() {
    stop_ = true;
    waker_.wake();
    thread_.join();
  }

 private:
  Waker waker_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

inline void expect_still_serving(Server* server, const Security& security) {
  Serving serving(server);
  Client client(server->endpoint(), security, "the coordinator");
  EXPECT_TRUE(client.call(status_request(), soon()).has_status_request());
}

}  // namespace muster
