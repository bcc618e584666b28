#include "common/transport/zap.h"

#include <spdlog/spdlog.h>

#include <array>
#include <vector>

#include "common/check.h"
#include "common/transport/socket.h"

namespace muster::transport {

const char* const kZapDomain = "muster";

namespace {

std::vector<zmq::message_t> receive_parts(zmq::socket_t* socket) {
  std::vector<zmq::message_t> parts;
  do {
    parts.emplace_back();
    if (!uninterrupted([&] { return socket->recv(parts.back()); })) return {};
  } while (parts.back().more());
  return parts;
}

}  // namespace

ZapHandler::ZapHandler(zmq::context_t* context, const std::string& public_key)
    : context_(context), key_(32, '\0'), socket_(*context, zmq::socket_type::rep) {
  MUSTER_CHECK(zmq_z85_decode(reinterpret_cast<uint8_t*>(key_.data()), public_key.c_str()) !=
               nullptr);
  socket_.set(zmq::sockopt::linger, 0);
  uninterrupted([&] { socket_.bind("inproc://zeromq.zap.01"); });
  // The socket moves to the thread; starting a thread is a full fence, as libzmq asks.
  thread_ = std::thread([this] { run(); });
}

ZapHandler::~ZapHandler() {
  context_->shutdown();
  thread_.join();
}

void ZapHandler::run() noexcept {
  while (true) {
    try {
      answer();
    } catch (const zmq::error_t& e) {
      // Anything but the end of the context leaves the run without a handler: nobody is admitted
      // any more.
      if (e.num() != ETERM) spdlog::error("authentication stops: {}", e.what());
      break;
    } catch (const std::exception& e) {
      spdlog::error("authentication stops: {}", e.what());
      break;
    }
  }
  socket_.close();
}

void ZapHandler::answer() {
  // version, request id, domain, address, identity, mechanism, credentials
  std::vector<zmq::message_t> request = receive_parts(&socket_);
  const bool well_formed = request.size() == 7 && request[0].to_string_view() == "1.0";
  const bool admitted = well_formed && request[2].to_string_view() == kZapDomain &&
                        request[5].to_string_view() == "CURVE" &&
                        request[6].to_string_view() == key_;
  if (!admitted) {
    spdlog::debug("refused a connection from {}: wrong run key",
                  well_formed ? request[3].to_string() : "an unknown address");
  }
  // version, request id, status, why, user id, metadata
  const std::string id = request.size() > 1 ? request[1].to_string() : "";
  const std::array<std::string, 6> reply = {
      "1.0", id, admitted ? "200" : "400", admitted ? "OK" : "wrong run key", "", ""};
  for (size_t i = 0; i < reply.size(); ++i) {
    const auto flags = i + 1 < reply.size() ? zmq::send_flags::sndmore : zmq::send_flags::none;
    uninterrupted([&] { return socket_.send(zmq::buffer(reply[i]), flags); });
  }
}

}  // namespace muster::transport
