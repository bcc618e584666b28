// The ZAP handler (ZeroMQ RFC 27): the one place that decides who may connect. Internal to
// common/transport.
#pragma once

#include <string>
#include <thread>
#include <zmq.hpp>

namespace muster::transport {

// The ZAP domain of every Muster socket. With ZMQ_ZAP_ENFORCE_DOMAIN libzmq refuses all when no
// handler answers.
extern const char* const kZapDomain;

// Answers the authentication requests of one context in a thread of its own, and admits the one
// public key of the run. Fails closed: any request that is not exactly as expected is refused. The
// Monitor reports refusals.
class ZapHandler {
 public:
  // `public_key`: Z85. Bound when the constructor returns.
  ZapHandler(zmq::context_t* context, const std::string& public_key);
  // Shuts the context down (which ends the thread's wait): close every other socket of it first.
  ~ZapHandler();
  ZapHandler(const ZapHandler&) = delete;
  ZapHandler& operator=(const ZapHandler&) = delete;

 private:
  void run() noexcept;
  void answer();

  zmq::context_t* context_;
  std::string key_;  // 32 bytes
  zmq::socket_t socket_;
  std::thread thread_;
};

}  // namespace muster::transport
