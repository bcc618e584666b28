#include "common/transport/socket.h"

#include <algorithm>
#include <array>
#include <cerrno>

#include "common/transport/keys.h"
#include "common/transport/zap.h"

namespace muster::transport {

namespace {

// Messages queued a peer, each way. A peer that is this far behind is treated as gone.
constexpr int kHighWater = 4096;
// A TCP client that says nothing is cut off after this time.
constexpr int kHandshakeMs = 10'000;
constexpr int kMissedHeartbeats = 5;
// ZMQ_ZAP_ENFORCE_DOMAIN: zmq.h shows the name to draft builds only, but stable libraries know the
// option. Without it libzmq admits everybody when no ZAP handler answers.
constexpr int kZapEnforceDomain = 93;

}  // namespace

zmq::recv_result_t receive_now(zmq::socket_t* socket, zmq::message_t* message) {
  return uninterrupted([&] { return socket->recv(*message, zmq::recv_flags::dontwait); });
}

zmq::send_result_t send_now(zmq::socket_t* socket, zmq::message_t* message, zmq::send_flags flags) {
  return uninterrupted([&] { return socket->send(*message, flags | zmq::send_flags::dontwait); });
}

void configure(zmq::socket_t* socket, const TransportOptions& options) {
  const int beat_ms = std::max(1, static_cast<int>(options.heartbeat_s * 1000));
  socket->set(zmq::sockopt::linger, static_cast<int>(options.linger_s * 1000));
  socket->set(zmq::sockopt::sndhwm, kHighWater);
  socket->set(zmq::sockopt::rcvhwm, kHighWater);
  socket->set(zmq::sockopt::maxmsgsize, options.max_message_bytes);
  socket->set(zmq::sockopt::heartbeat_ivl, beat_ms);
  socket->set(zmq::sockopt::heartbeat_timeout, kMissedHeartbeats * beat_ms);
  socket->set(zmq::sockopt::handshake_ivl, kHandshakeMs);
  socket->set(zmq::sockopt::reconnect_ivl, 50);
  socket->set(zmq::sockopt::reconnect_ivl_max, 1000);
}

void secure(zmq::socket_t* socket, const Security& security, bool server) {
  if (!security.enabled()) return;
  const std::string public_key = public_key_of(security.run_key);
  socket->set(zmq::sockopt::curve_publickey, public_key);
  socket->set(zmq::sockopt::curve_secretkey, security.run_key);
  if (server) {
    socket->set(zmq::sockopt::curve_server, true);
    socket->set(zmq::sockopt::zap_domain, kZapDomain);
    const int enforce = 1;
    if (zmq_setsockopt(socket->handle(), kZapEnforceDomain, &enforce, sizeof enforce) != 0) {
      throw zmq::error_t();
    }
  } else {
    socket->set(zmq::sockopt::curve_serverkey, public_key);
  }
}

Wake wait(zmq::socket_t* socket, short events, zmq::socket_t* monitor, Waker* waker,
          Deadline deadline) {
  std::array<zmq_pollitem_t, 3> items{{
      {socket->handle(), 0, events, 0},
      {monitor->handle(), 0, ZMQ_POLLIN, 0},
      {nullptr, waker == nullptr ? -1 : waker->fd(), ZMQ_POLLIN, 0},
  }};
  const int count = waker == nullptr ? 2 : 3;
  while (true) {
    if (zmq_poll(items.data(), count, static_cast<long>(deadline.left().count())) < 0) {
      if (zmq_errno() != EINTR) throw zmq::error_t();
      if (deadline.passed()) return Wake::kDeadline;
      continue;
    }
    if (waker != nullptr && items[2].revents != 0) return Wake::kWaker;
    if (items[0].revents != 0 || items[1].revents != 0) return Wake::kSocket;
    if (deadline.passed()) return Wake::kDeadline;
  }
}

}  // namespace muster::transport
