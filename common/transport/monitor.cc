#include "common/transport/monitor.h"

#include <cstdint>
#include <cstring>

#include "common/transport/socket.h"

namespace muster::transport {

namespace {

constexpr int kEvents = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH |
                        ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                        ZMQ_EVENT_CONNECT_RETRIED | ZMQ_EVENT_DISCONNECTED;

std::optional<ConnectionEvent> meaning(uint16_t event, uint32_t value) {
  switch (event) {
    case ZMQ_EVENT_HANDSHAKE_SUCCEEDED:
      return ConnectionEvent::kConnected;
    case ZMQ_EVENT_HANDSHAKE_FAILED_AUTH:
      return ConnectionEvent::kKeyRefused;
    case ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL:
      if (value == ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC) return ConnectionEvent::kKeyRefused;
      if (value == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH) {
        return ConnectionEvent::kOtherSecurity;
      }
      return ConnectionEvent::kNotOurs;
    case ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL:
      return ConnectionEvent::kDropped;
    case ZMQ_EVENT_CONNECT_RETRIED:
      return ConnectionEvent::kUnreachable;
    case ZMQ_EVENT_DISCONNECTED:
      return ConnectionEvent::kLost;
    default:
      return std::nullopt;
  }
}

}  // namespace

Monitor::Monitor(zmq::context_t* context, zmq::socket_t* watched)
    : watched_(watched), socket_(*context, zmq::socket_type::pair) {
  // One context a Server or Client, so the name cannot clash.
  const char* address = "inproc://monitor";
  uninterrupted([&] {
    if (zmq_socket_monitor(watched_->handle(), address, kEvents) != 0) throw zmq::error_t();
  });
  socket_.set(zmq::sockopt::linger, 0);
  uninterrupted([&] { socket_.connect(address); });
}

Monitor::~Monitor() {
  zmq_socket_monitor(watched_->handle(), nullptr, 0);
}

std::optional<ConnectionEvent> Monitor::next() {
  zmq::message_t event;
  while (receive_now(&socket_, &event)) {
    zmq::message_t address;
    if (event.more() && !receive_now(&socket_, &address)) return std::nullopt;
    if (event.size() != sizeof(uint16_t) + sizeof(uint32_t)) continue;
    uint16_t number = 0;
    uint32_t value = 0;
    std::memcpy(&number, event.data(), sizeof number);
    std::memcpy(&value, event.data<char>() + sizeof number, sizeof value);
    if (auto result = meaning(number, value)) return result;
  }
  return std::nullopt;
}

}  // namespace muster::transport
