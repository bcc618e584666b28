// What libzmq tells about the connections below a socket. Internal to common/transport.
#pragma once

#include <optional>
#include <string>
#include <zmq.hpp>

namespace muster::transport {

enum class ConnectionEvent {
  kConnected,      // handshake done
  kKeyRefused,     // the handshake failed on the key
  kOtherSecurity,  // one side has a run key, the other has none
  kNotOurs,        // the other side does not speak ZMTP
  kDropped,        // the other side closed the connection inside the handshake
  kUnreachable,    // nobody listens; libzmq tries again
  kLost,           // an established connection ended; libzmq tries again
};

class Monitor {
 public:
  // Watches `watched`, which must outlive this object's use of next().
  Monitor(zmq::context_t* context, zmq::socket_t* watched);
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  // The next event that has already happened; never blocks.
  std::optional<ConnectionEvent> next();
  zmq::socket_t& socket() { return socket_; }

 private:
  zmq::socket_t* watched_;
  zmq::socket_t socket_;
};

}  // namespace muster::transport
