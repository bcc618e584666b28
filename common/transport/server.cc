#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <set>
#include <zmq.hpp>

#include "common/error.h"
#include "common/transport/codec.h"
#include "common/transport/keys.h"
#include "common/transport/monitor.h"
#include "common/transport/socket.h"
#include "common/transport/transport.h"
#include "common/transport/zap.h"

namespace muster {

namespace {

// Peers whose garbage was logged. Bounded: a flood of connections must not eat memory.
constexpr size_t kRemembered = 1024;

std::string bind_error(const std::string& endpoint, int error) {
  switch (error) {
    case EADDRINUSE:
      return fmt::format(
          "cannot listen on {}: the address is in use by another process: stop that one, or choose "
          "another port (port 0 picks a free one)",
          endpoint);
    case EADDRNOTAVAIL:
    case ENODEV:
      return fmt::format("cannot listen on {}: this machine has no such address", endpoint);
    default:
      return fmt::format("cannot listen on {}: {}", endpoint, zmq_strerror(error));
  }
}

std::string printable(const std::string& peer) {
  std::string hex;
  for (unsigned char c : peer.substr(0, 8)) hex += fmt::format("{:02x}", c);
  return hex;
}

}  // namespace

struct Message::Body {
  zmq::message_t& encoded() {
    if (!frame) {
      transport::stamp(&envelope);
      frame = transport::encode(envelope);
    }
    return *frame;
  }
  proto::Envelope envelope;
  std::optional<zmq::message_t> frame;
};

Message::Message(proto::Envelope envelope)
    : body_(std::make_shared<Body>(Body{std::move(envelope), std::nullopt})) {}

const proto::Envelope& Message::envelope() const {
  return body_->envelope;
}

std::string_view Message::bytes() const {
  return body_->encoded().to_string_view();
}

struct Server::Impl {
  Impl(const std::string& wanted, const Security& security, const TransportOptions& options)
      : socket(context, zmq::socket_type::router) {
    if (!security.enabled() && reaches_beyond_this_machine(wanted)) {
      throw ConfigError(fmt::format(
          "refusing to listen on {} without a run key: anyone on the network could steer the run",
          wanted));
    }
    transport::configure(&socket, options);
    // A message to a peer that is gone is an error, not a silent drop.
    socket.set(zmq::sockopt::router_mandatory, true);
    // A client keeps its routing id when its connection breaks; the new connection takes over.
    socket.set(zmq::sockopt::router_handover, true);
    transport::secure(&socket, security, /*server=*/true);
    if (security.enabled()) {
      zap.emplace(&context, transport::public_key_of(security.run_key));
    }
    monitor.emplace(&context, &socket);
    try {
      transport::uninterrupted([&] { socket.bind(wanted); });
    } catch (const zmq::error_t& e) {
      const int error = e.num();
      close();
      throw PeerError(bind_error(wanted, error));
    }
    endpoint = socket.get(zmq::sockopt::last_endpoint);
  }
  ~Impl() { close(); }

  void close() {
    // Order matters: the handler's end shuts the context down, which the other sockets must not
    // see.
    monitor.reset();
    socket.close();
    zap.reset();
  }

  void note_connections() {
    while (auto event = monitor->next()) {
      using transport::ConnectionEvent;
      if (*event == ConnectionEvent::kKeyRefused || *event == ConnectionEvent::kOtherSecurity) {
        // A refused client may try again for ever; one line is enough.
        if (++refused == 1) {
          spdlog::warn("refused a connection on {}: {}", endpoint,
                       *event == ConnectionEvent::kKeyRefused
                           ? "wrong run key"
                           : "one side has a run key, the other has none");
        }
      } else if (*event == ConnectionEvent::kNotOurs) {
        note_garbage("", "a connection that does not speak our protocol");
      }
    }
  }

  void note_garbage(const std::string& peer, const std::string& what) {
    ++garbage;
    if (warned.size() < kRemembered && warned.insert(peer).second) {
      spdlog::warn("{} on {} from peer {}: dropped, and so will be what follows it", what, endpoint,
                   peer.empty() ? "(unknown)" : printable(peer));
    }
  }

  // One message off the socket, if there is one. False: nothing left.
  bool take(std::optional<Received>* out) {
    zmq::message_t peer;
    if (!transport::receive_now(&socket, &peer)) return false;
    zmq::message_t frame;
    size_t frames = 0;
    for (bool more = peer.more(); more; ++frames) {
      if (!transport::receive_now(&socket, &frame)) break;
      more = frame.more();
    }
    Received received{peer.to_string(), {}};
    const auto kind =
        frames == 1 ? transport::decode(frame, &received.envelope) : transport::FrameKind::kGarbage;
    switch (kind) {
      case transport::FrameKind::kGood:
        *out = std::move(received);
        break;
      case transport::FrameKind::kOtherVersion: {
        const std::string reason = transport::version_mismatch(received.envelope);
        note_garbage(received.peer, "refused a message: " + reason);
        proto::Envelope answer;
        answer.set_request_id(received.envelope.request_id());
        answer.mutable_refused()->set_reason(reason);
        send(received.peer, std::move(answer));
        break;
      }
      case transport::FrameKind::kGarbage:
        note_garbage(received.peer, "garbage");
        break;
    }
    return true;
  }

  bool send(const std::string& peer, const Message& message) {
    zmq::message_t to(peer);
    zmq::message_t frame;
    frame.copy(message.body_->encoded());  // one more reader of the same bytes
    try {
      if (!transport::send_now(&socket, &to, zmq::send_flags::sndmore)) return false;
      return transport::send_now(&socket, &frame).has_value();
    } catch (const zmq::error_t& e) {
      if (e.num() == EHOSTUNREACH) return false;
      throw PeerError(fmt::format("cannot send from {}: {}", endpoint, e.what()));
    }
  }

  zmq::context_t context;
  zmq::socket_t socket;
  std::optional<transport::ZapHandler> zap;
  std::optional<transport::Monitor> monitor;
  std::string endpoint;
  std::set<std::string> warned;
  int64_t garbage = 0;
  int64_t refused = 0;
};

Server::Server(const std::string& endpoint, const Security& security,
               const TransportOptions& options)
    : impl_(std::make_unique<Impl>(endpoint, security, options)) {}
Server::~Server() = default;

const std::string& Server::endpoint() const {
  return impl_->endpoint;
}

std::optional<Received> Server::receive(Deadline deadline, Waker* waker) {
  std::optional<Received> result;
  // At least one look, also past the deadline; then garbage cannot keep us here beyond it.
  do {
    const auto wake =
        transport::wait(&impl_->socket, ZMQ_POLLIN, &impl_->monitor->socket(), waker, deadline);
    if (wake != transport::Wake::kSocket) return std::nullopt;
    impl_->note_connections();
    impl_->take(&result);
    if (result) return result;
  } while (!deadline.passed());
  return std::nullopt;
}

bool Server::send(const std::string& peer, const Message& message) {
  return impl_->send(peer, message);
}

int64_t Server::garbage_count() const {
  return impl_->garbage;
}
int64_t Server::refused_count() const {
  return impl_->refused;
}

}  // namespace muster
