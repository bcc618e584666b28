#include <fmt/format.h>
#include <unistd.h>

#include <deque>
#include <random>
#include <zmq.hpp>

#include "common/error.h"
#include "common/transport/codec.h"
#include "common/transport/monitor.h"
#include "common/transport/socket.h"
#include "common/transport/transport.h"

namespace muster {

namespace {

// A server that refuses a key closes the connection without a word; one closed handshake may be a
// server that just went away, this many in a row are a refusal.
constexpr int kDropsThatRefuse = 3;

// Which of these libzmq lets us see depends on who closes the connection first, so each names every
// cause.
const char* const kWrongKey =
    "the run key is wrong, or that run uses no run key: take the key of this run (RUN_DIR/run.key)";
const char* const kUnwantedKey =
    "that run uses no run key, but this process has one: unset MUSTER_RUN_KEY";
const char* const kNoKey =
    "it asks for a run key, and this process has none: pass the key of the run (RUN_DIR/run.key)";

// Unique for the life of the client and unguessable; must not start with a zero byte.
std::string random_routing_id() {
  std::random_device random;
  std::string id = "m";
  for (int i = 0; i < 15; ++i) id.push_back(static_cast<char>(random() & 0xff));
  return id;
}

}  // namespace

struct Client::Impl {
  Impl(std::string to, const Security& security, std::string name, const TransportOptions& options)
      : endpoint(std::move(to)),
        peer(std::move(name)),
        has_key(security.enabled()),
        socket(context, zmq::socket_type::dealer) {
    transport::configure(&socket, options);
    socket.set(zmq::sockopt::routing_id, random_routing_id());
    transport::secure(&socket, security, /*server=*/false);
    monitor.emplace(&context, &socket);
    try {
      transport::uninterrupted([&] { socket.connect(endpoint); });
    } catch (const zmq::error_t& e) {
      const std::string why = e.what();
      close();
      throw PeerError(fmt::format("cannot reach {} at \"{}\": {} (expected tcp://HOST:PORT)", peer,
                                  endpoint, why));
    }
  }
  ~Impl() { close(); }

  void close() {
    // What is queued for a server that refuses us will never leave.
    // By the C function: a destructor comes here, and this one does not throw.
    const int none = 0;
    if (!refusal.empty()) zmq_setsockopt(socket.handle(), ZMQ_LINGER, &none, sizeof none);
    monitor.reset();
    socket.close();
  }

  // Throws PeerError once the server is known to refuse us; again at every later call.
  void check_connection() {
    while (auto event = monitor->next()) {
      using transport::ConnectionEvent;
      switch (*event) {
        case ConnectionEvent::kConnected:
          drops = 0;
          break;
        case ConnectionEvent::kKeyRefused:
          refuse(kWrongKey);
          break;
        case ConnectionEvent::kOtherSecurity:
          refuse(has_key ? kUnwantedKey : kNoKey);
          break;
        case ConnectionEvent::kNotOurs:
          refuse("what listens there does not speak Muster's protocol");
          break;
        case ConnectionEvent::kDropped:
          if (++drops >= kDropsThatRefuse) {
            refuse(has_key ? kWrongKey : kNoKey);
          }
          break;
        case ConnectionEvent::kUnreachable:
        case ConnectionEvent::kLost:
          break;
      }
    }
    if (!refusal.empty()) throw PeerError(refusal);
  }

  void refuse(const std::string& why) {
    if (refusal.empty()) {
      refusal = fmt::format("{} at {} refuses the connection: {}", peer, endpoint, why);
    }
  }

  // The next message off the socket. Garbage from a server that we trust to be ours is skipped.
  std::optional<proto::Envelope> take() {
    zmq::message_t frame;
    while (transport::receive_now(&socket, &frame)) {
      size_t frames = 1;
      while (frame.more()) {
        if (!transport::receive_now(&socket, &frame)) break;
        ++frames;
      }
      proto::Envelope envelope;
      const auto kind =
          frames == 1 ? transport::decode(frame, &envelope) : transport::FrameKind::kGarbage;
      if (kind == transport::FrameKind::kGarbage) continue;
      // A server of another version says so itself: Refused is the one message every version can
      // read.
      if (envelope.has_refused()) {
        refusal =
            fmt::format("{} at {} refused us: {}", peer, endpoint, envelope.refused().reason());
        throw PeerError(refusal);
      }
      if (kind == transport::FrameKind::kOtherVersion) {
        refuse(transport::version_mismatch(envelope));
        throw PeerError(refusal);
      }
      return envelope;
    }
    return std::nullopt;
  }

  std::optional<proto::Envelope> next(Deadline deadline, Waker* waker) {
    while (true) {
      // Nothing is to be waited for where we were refused.
      if (!refusal.empty()) deadline = Deadline::now();
      const auto wake = transport::wait(&socket, ZMQ_POLLIN, &monitor->socket(), waker, deadline);
      if (wake == transport::Wake::kWaker) return std::nullopt;
      // Messages first: a server may answer and close.
      if (auto envelope = take()) return envelope;
      check_connection();
      if (wake == transport::Wake::kDeadline || deadline.passed()) return std::nullopt;
    }
  }

  std::string endpoint;
  std::string peer;
  bool has_key;
  zmq::context_t context;
  zmq::socket_t socket;
  std::optional<transport::Monitor> monitor;
  std::deque<proto::Envelope> kept;  // arrived during call(), for receive()
  std::string refusal;
  int drops = 0;
  uint64_t last_request = 0;
};

Client::Client(const std::string& endpoint, const Security& security, std::string peer_name,
               const TransportOptions& options)
    : impl_(std::make_unique<Impl>(endpoint, security, std::move(peer_name), options)) {}
Client::~Client() = default;

void Client::send(proto::Envelope envelope, Deadline deadline) {
  impl_->check_connection();
  transport::stamp(&envelope);
  zmq::message_t frame = transport::encode(envelope);
  while (!transport::send_now(&impl_->socket, &frame)) {
    const auto wake =
        transport::wait(&impl_->socket, ZMQ_POLLOUT, &impl_->monitor->socket(), nullptr, deadline);
    impl_->check_connection();
    if (wake == transport::Wake::kDeadline) {
      throw PeerError(fmt::format("{} at {} does not take our messages: it is gone or stuck",
                                  impl_->peer, impl_->endpoint));
    }
  }
}

std::optional<proto::Envelope> Client::receive(Deadline deadline, Waker* waker) {
  if (!impl_->kept.empty()) {
    proto::Envelope envelope = std::move(impl_->kept.front());
    impl_->kept.pop_front();
    return envelope;
  }
  return impl_->next(deadline, waker);
}

proto::Envelope Client::call(proto::Envelope envelope, Deadline deadline) {
  const uint64_t id = ++impl_->last_request;
  envelope.set_request_id(id);
  const std::string asked =
      envelope.GetDescriptor()->FindFieldByNumber(static_cast<int>(envelope.body_case()))->name();
  send(std::move(envelope), deadline);
  while (auto reply = impl_->next(deadline, nullptr)) {
    if (reply->request_id() == id) return std::move(*reply);
    impl_->kept.push_back(std::move(*reply));
  }
  throw TimeoutError(fmt::format("{} at {} did not answer to \"{}\" in time: is it running?",
                                 impl_->peer, impl_->endpoint, asked));
}

}  // namespace muster
