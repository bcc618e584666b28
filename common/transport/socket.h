// Options and waits that Server and Client share. Internal to common/transport.
#pragma once

#include <cerrno>
#include <string>
#include <zmq.hpp>

#include "common/transport/transport.h"

namespace muster::transport {

// Makes a call of libzmq, again for as long as a signal interrupts it. Any call may end with EINTR,
// those that never wait too: each looks for commands of libzmq's own threads first, and has sent or
// received nothing when a signal comes meanwhile.
template <typename Call>
auto uninterrupted(Call call) {
  while (true) {
    try {
      return call();
    } catch (const zmq::error_t& e) {
      if (e.num() != EINTR) throw;
    }
  }
}
// Never block; nullopt when there is nothing to take, or no room.
zmq::recv_result_t receive_now(zmq::socket_t* socket, zmq::message_t* message);
zmq::send_result_t send_now(zmq::socket_t* socket, zmq::message_t* message,
                            zmq::send_flags flags = zmq::send_flags::none);

// Limits, linger, heartbeats, IPv6.
void configure(zmq::socket_t* socket, const TransportOptions& options);
// CURVE with the run key on both sides; nothing when `security` is off.
void secure(zmq::socket_t* socket, const Security& security, bool server);

enum class Wake { kSocket, kWaker, kDeadline };
// Waits until `socket` has one of `events` (ZMQ_POLLIN, ZMQ_POLLOUT), `monitor` has something to
// read, `waker` (may be null) fires, or the deadline passes. The waker is looked at first: a flood
// of messages cannot hide it.
Wake wait(zmq::socket_t* socket, short events, zmq::socket_t* monitor, Waker* waker,
          Deadline deadline);

}  // namespace muster::transport
