// Messages between processes: the only code that knows ZeroMQ. A Server (ROUTER) answers many
// Clients (DEALER). No call blocks without a deadline. Objects belong to one thread; only Waker may
// be used from any thread and from signal handlers.
//
// Security: with a run key every connection is CURVE-encrypted and authenticated. The key (one
// Z85-encoded Curve25519 secret, 40 characters) is the long-term key of both sides, and a ZAP
// handler admits its public key alone; without the handler's word nobody is admitted.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "common/deadline.h"
#include "common/protocol/muster.pb.h"

namespace muster {

// Raised by one for every change of muster.proto that older peers cannot read.
constexpr uint32_t kProtocolVersion = 1;
// "0.1.0"; shown to people, compared by nobody.
extern const char* const kBuildVersion;

struct Security {
  std::string run_key;  // empty: no encryption, no authentication (loopback and abstract ipc only)
  bool enabled() const { return !run_key.empty(); }
};
// A fresh random run key.
std::string generate_run_key();
// Reads a key file that only its owner may read. Throws IoError (missing, readable by others) or
// ConfigError.
std::string read_run_key(const std::string& path);
// Whether `endpoint` can be reached from another machine ("tcp://*:…", "tcp://10.…": yes;
// "tcp://127.…", "ipc://": no).
bool reaches_beyond_this_machine(const std::string& endpoint);

// Ends a wait in receive() from another thread or from a signal handler. Stays on until clear().
class Waker {
 public:
  Waker();
  ~Waker();
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;
  void wake() noexcept;  // async-signal-safe
  void clear() noexcept;
  int fd() const { return fd_; }

 private:
  int fd_;
};

struct Received {
  std::string peer;  // opaque routing id
  proto::Envelope envelope;
};

// What a server sends, to one peer or to thousands: encoded, with version and build, when it first
// leaves, and its bytes are shared by all who get it. Copies are cheap and stand for the same
// message.
class Message {
 public:
  Message(proto::Envelope envelope);  // NOLINT(google-explicit-constructor): any envelope is one
  const proto::Envelope& envelope() const;
  // As they go over the wire.
  std::string_view bytes() const;

 private:
  friend class Server;
  struct Body;
  std::shared_ptr<Body> body_;
};

struct TransportOptions {
  int64_t max_message_bytes = 64 << 20;
  double heartbeat_s = 1.0;  // ZeroMQ-level liveness of the connection
  double linger_s = 0.5;     // how long a destructor may wait for queued messages to leave
};

class Server {
 public:
  // Binds. "tcp://host:0" picks a free port; "ipc://@name" is an abstract socket that leaves no
  // file. Throws PeerError naming the endpoint when the address is in use or cannot be bound.
  Server(const std::string& endpoint, const Security& security,
         const TransportOptions& options = {});
  ~Server();
  // As bound, with the port filled in.
  const std::string& endpoint() const;
  // The next well-formed message of this protocol version; nullopt at the deadline or when `waker`
  // fires. Garbage is counted, logged once a peer and dropped; another version is answered with
  // Refused by name.
  std::optional<Received> receive(Deadline deadline, Waker* waker = nullptr);
  // False when the peer is not connected (any more) or its queue is full. Never blocks.
  bool send(const std::string& peer, const Message& message);
  // Messages and connections dropped as garbage, connections refused by the key; since the start,
  // as far as receive() has come.
  int64_t garbage_count() const;
  int64_t refused_count() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class Client {
 public:
  // Connects in the background. `peer_name` ("the coordinator", "the data service") is used in
  // error messages.
  Client(const std::string& endpoint, const Security& security, std::string peer_name,
         const TransportOptions& options = {});
  ~Client();
  // Queues. Throws PeerError when the queue stays full past the deadline.
  void send(proto::Envelope envelope, Deadline deadline);
  // The next message; nullopt at the deadline or when `waker` fires. Throws PeerError on Refused,
  // with the reason, and when the server rejects the run key.
  std::optional<proto::Envelope> receive(Deadline deadline, Waker* waker = nullptr);
  // Sends and waits for the reply with the same request_id; replies to other requests that arrive
  // meanwhile are kept for receive(). Throws TimeoutError naming peer and endpoint, PeerError on
  // Refused.
  proto::Envelope call(proto::Envelope envelope, Deadline deadline);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
