// Options and waits that Server and Client share. Internal to common/transport.
#pragma once

#include <string>
#include <zmq.hpp>

#include "common/transport/transport.h"

namespace muster::transport {

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
