// Server and Client against each other and against hostile peers, over real sockets.
#include "common/transport/transport.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <csignal>
#include <thread>
#include <zmq.hpp>

#include "common/transport/transport_testing.h"

namespace muster {
namespace {

using testing::HasSubstr;

TEST(TransportTest, ARequestGetsItsReply) {
  Server server("tcp://127.0.0.1:0", {});
  Client client(server.endpoint(), {}, "the coordinator");
  client.send(heartbeat(), soon());
  auto received = server.receive(soon());
  ASSERT_TRUE(received);
  EXPECT_TRUE(received->envelope.has_heartbeat());
  EXPECT_EQ(received->envelope.version(), kProtocolVersion);
  EXPECT_EQ(received->envelope.build(), kBuildVersion);

  proto::Envelope stop;
  stop.mutable_stop()->set_reason("done");
  EXPECT_TRUE(server.send(received->peer, stop));
  auto answer = client.receive(soon());
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->stop().reason(), "done");
}

TEST(TransportTest, AMessageToManyIsEncodedOnce) {
  Server server("tcp://127.0.0.1:0", {});
  Client one(server.endpoint(), {}, "the coordinator");
  Client other(server.endpoint(), {}, "the coordinator");
  proto::Envelope stop;
  // Longer than what ZeroMQ keeps inside its own message.
  stop.mutable_stop()->set_reason(std::string(10'000, 'x'));
  const Message message(stop);
  const void* bytes = message.bytes().data();
  for (Client* client : {&one, &other}) {
    client->send(heartbeat(), soon());
    const auto received = server.receive(soon());
    ASSERT_TRUE(received);
    EXPECT_TRUE(server.send(received->peer, message));
  }
  for (Client* client : {&one, &other}) {
    const auto answer = client->receive(soon());
    ASSERT_TRUE(answer);
    EXPECT_EQ(answer->stop().reason(), stop.stop().reason());
    EXPECT_EQ(answer->version(), kProtocolVersion);
  }
  EXPECT_EQ(message.bytes().data(), bytes);
}

TEST(TransportTest, EveryEndpointFormWorks) {
  const std::string name = "ipc://@muster-test-" + std::to_string(getpid());
  for (const std::string& endpoint : {name, std::string("tcp://127.0.0.1:0")}) {
    Server server(endpoint, {});
    Serving serving(&server);
    Client client(server.endpoint(), {}, "the coordinator");
    EXPECT_TRUE(client.call(status_request(), soon()).has_status_request()) << endpoint;
  }
}

TEST(TransportTest, CallKeepsOtherMessagesForReceive) {
  Server server("tcp://127.0.0.1:0", {});
  Client client(server.endpoint(), {}, "the coordinator");
  std::thread responder([&] {
    auto request = server.receive(soon());
    if (!request) return;
    server.send(request->peer, heartbeat());
    proto::Envelope reply;
    reply.set_request_id(request->envelope.request_id());
    reply.mutable_status()->set_step(7);
    server.send(request->peer, reply);
  });
  EXPECT_EQ(client.call(status_request(), soon()).status().step(), 7);
  responder.join();
  auto kept = client.receive(briefly());
  ASSERT_TRUE(kept);
  EXPECT_TRUE(kept->has_heartbeat());
}

TEST(TransportTest, DeadlinesHoldAndNameThePeer) {
  Server server("tcp://127.0.0.1:0", {});
  EXPECT_FALSE(server.receive(briefly()));
  EXPECT_FALSE(server.receive(Deadline::now()));
  Client client(server.endpoint(), {}, "the data service");
  EXPECT_FALSE(client.receive(briefly()));
  const std::string error =
      error_of<TimeoutError>([&] { client.call(status_request(), briefly()); });
  EXPECT_THAT(error, HasSubstr("data service at " + server.endpoint()));
  EXPECT_THAT(error, HasSubstr("status_request"));
}

TEST(TransportTest, NobodyListens) {
  std::string endpoint;
  { endpoint = Server("tcp://127.0.0.1:0", {}).endpoint(); }
  Client client(endpoint, {}, "the coordinator");
  EXPECT_THAT(error_of<TimeoutError>([&] { client.call(status_request(), briefly()); }),
              HasSubstr(endpoint));
}

TEST(TransportTest, AWakerEndsTheWait) {
  Server server("tcp://127.0.0.1:0", {});
  Client client(server.endpoint(), {}, "the coordinator");
  Waker waker;
  waker.wake();
  EXPECT_FALSE(client.receive(soon(), &waker));
  std::thread other([&] { waker.wake(); });
  const auto start = Deadline::Clock::now();
  EXPECT_FALSE(server.receive(soon(), &waker));
  EXPECT_LT(Deadline::Clock::now() - start, std::chrono::seconds(5));
  other.join();
  waker.clear();
  EXPECT_FALSE(server.receive(briefly(), &waker));
}

// Sends this process SIGALRM all the time while it lives; the main thread gets it.
class SignalStorm {
 public:
  SignalStorm() {
    struct sigaction action {};
    action.sa_handler = [](int) {};
    ::sigaction(SIGALRM, &action, &former_);
    set_interval(50);
  }
  ~SignalStorm() {
    set_interval(0);
    ::sigaction(SIGALRM, &former_, nullptr);
  }
  SignalStorm(const SignalStorm&) = delete;
  SignalStorm& operator=(const SignalStorm&) = delete;

 private:
  static void set_interval(int microseconds) {
    const itimerval timer{.it_interval = {0, microseconds}, .it_value = {0, microseconds}};
    ::setitimer(ITIMER_REAL, &timer, nullptr);
  }
  struct sigaction former_ {};
};

TEST(TransportTest, SignalsInterruptNoCall) {
  const SignalStorm storm;
  Server server("tcp://127.0.0.1:0", {});
  Client client(server.endpoint(), {}, "the coordinator");
  const Deadline end = Deadline::after(std::chrono::milliseconds(300));
  while (!end.passed()) {
    client.send(heartbeat(), soon());
    const auto received = server.receive(soon());
    ASSERT_TRUE(received);
    EXPECT_TRUE(server.send(received->peer, heartbeat()));
    EXPECT_TRUE(client.receive(soon()));
    for (int i = 0; i < 100; ++i) EXPECT_FALSE(client.receive(Deadline::now()));
  }
}

TEST(TransportTest, APortInUseIsNamed) {
  Server server("tcp://127.0.0.1:0", {});
  const std::string error = error_of<PeerError>([&] { Server second(server.endpoint(), {}); });
  EXPECT_THAT(error, HasSubstr(server.endpoint()));
  EXPECT_THAT(error, HasSubstr("in use"));
  EXPECT_THAT(error, HasSubstr("choose another port"));
}

TEST(TransportTest, ABadEndpointIsNamed) {
  EXPECT_THAT(error_of<PeerError>([] { Server server("tcp://127.0.0.1", {}); }),
              HasSubstr("tcp://127.0.0.1"));
  EXPECT_THAT(error_of<PeerError>([] { Client client("nonsense", {}, "the coordinator"); }),
              HasSubstr("\"nonsense\""));
}

TEST(TransportTest, SendingToAPeerThatIsGoneFails) {
  Server server("tcp://127.0.0.1:0", {});
  std::string peer;
  {
    Client client(server.endpoint(), {}, "the coordinator");
    client.send(heartbeat(), soon());
    auto received = server.receive(soon());
    ASSERT_TRUE(received);
    peer = received->peer;
    EXPECT_TRUE(server.send(peer, heartbeat()));
  }
  // The kernel tells of the closed connection a moment later.
  const Deadline deadline = soon();
  bool sent = true;
  while (sent && !deadline.passed()) {
    sent = server.send(peer, heartbeat());
    server.receive(Deadline::after(std::chrono::milliseconds(1)));
  }
  EXPECT_FALSE(sent);
  EXPECT_FALSE(server.send("never seen", heartbeat()));
}

TEST(TransportTest, AClientOutlivesItsServer) {
  auto server = std::make_unique<Server>("tcp://127.0.0.1:0", Security{});
  const std::string endpoint = server->endpoint();
  Client client(endpoint, {}, "the coordinator");
  client.send(heartbeat(), soon());
  auto first = server->receive(soon());
  ASSERT_TRUE(first);
  server.reset();
  server = std::make_unique<Server>(endpoint, Security{});
  const Deadline deadline = soon();
  std::optional<Received> again;
  while (!again && !deadline.passed()) {
    client.send(heartbeat(), soon());
    again = server->receive(briefly());
  }
  ASSERT_TRUE(again);
  EXPECT_EQ(again->peer, first->peer) << "a client keeps its routing id";
}

// Sends `bytes` over a plain TCP connection and returns it open.
int raw_tcp(const Server& server, const std::string& bytes) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port_of(server.endpoint())));
  inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(write(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  return fd;
}

TEST(TransportTest, RawTcpGarbageIsHarmless) {
  for (const Security& security : {Security{}, Security{generate_run_key()}}) {
    Server server("tcp://127.0.0.1:0", security);
    std::vector<int> fds;
    std::string noise;
    for (int i = 0; i < 5000; ++i) noise.push_back(static_cast<char>(i * 7919 >> 3));
    // A ZMTP 3.0 greeting that goes on with nonsense.
    const std::string greeting("\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL", 16);
    for (const std::string& bytes :
         {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), noise, std::string(100, '\0'),
          std::string(100, '\xff'), greeting + noise, std::string("\xff")}) {
      fds.push_back(raw_tcp(server, bytes));
    }
    while (server.receive(briefly())) ADD_FAILURE() << "garbage was taken for a message";
    expect_still_serving(&server, security);
    for (int fd : fds) close(fd);
    expect_still_serving(&server, security);
  }
}

TEST(TransportTest, RawZmqGarbageIsCountedAndDropped) {
  Server server("tcp://127.0.0.1:0", {});
  zmq::context_t context;
  zmq::socket_t raw(context, zmq::socket_type::dealer);
  raw.set(zmq::sockopt::linger, 0);
  raw.connect(server.endpoint());
  raw.send(zmq::str_buffer("not an envelope"), zmq::send_flags::none);
  raw.send(zmq::message_t(), zmq::send_flags::none);
  raw.send(zmq::str_buffer("two"), zmq::send_flags::sndmore);
  raw.send(zmq::str_buffer("frames"), zmq::send_flags::none);
  proto::Envelope no_body;
  no_body.set_version(kProtocolVersion);
  no_body.set_build("x");
  raw.send(zmq::buffer(no_body.SerializeAsString()), zmq::send_flags::none);
  // A good one behind them shows that all four were looked at.
  proto::Envelope good = heartbeat();
  good.set_version(kProtocolVersion);
  good.set_build("x");
  raw.send(zmq::buffer(good.SerializeAsString()), zmq::send_flags::none);
  auto received = server.receive(soon());
  ASSERT_TRUE(received);
  EXPECT_TRUE(received->envelope.has_heartbeat());
  EXPECT_EQ(server.garbage_count(), 4);
  expect_still_serving(&server, {});
}

TEST(TransportTest, AHugeMessageIsRefusedWithoutAllocatingIt) {
  TransportOptions small;
  small.max_message_bytes = 1000;
  Server server("tcp://127.0.0.1:0", {}, small);
  zmq::context_t context;
  zmq::socket_t raw(context, zmq::socket_type::dealer);
  raw.set(zmq::sockopt::linger, 0);
  raw.connect(server.endpoint());
  raw.send(zmq::buffer(std::string(2000, 'x')), zmq::send_flags::none);
  EXPECT_FALSE(server.receive(briefly()));
  EXPECT_EQ(server.garbage_count(), 0) << "it never became a message";
  expect_still_serving(&server, {});
}

TEST(TransportTest, AnotherProtocolVersionIsRefusedByName) {
  Server server("tcp://127.0.0.1:0", {});
  zmq::context_t context;
  zmq::socket_t raw(context, zmq::socket_type::dealer);
  raw.set(zmq::sockopt::linger, 0);
  raw.set(zmq::sockopt::rcvtimeo, 10'000);
  raw.connect(server.endpoint());
  proto::Envelope old = heartbeat();
  old.set_version(kProtocolVersion + 1);
  old.set_build("9.8.7");
  old.set_request_id(3);
  raw.send(zmq::buffer(old.SerializeAsString()), zmq::send_flags::none);
  EXPECT_FALSE(server.receive(briefly()));
  zmq::message_t frame;
  ASSERT_TRUE(raw.recv(frame));
  proto::Envelope answer;
  ASSERT_TRUE(answer.ParseFromString(frame.to_string()));
  EXPECT_EQ(answer.request_id(), 3u);
  EXPECT_THAT(answer.refused().reason(), HasSubstr("9.8.7"));
  EXPECT_THAT(answer.refused().reason(), HasSubstr(kBuildVersion));
}

TEST(TransportTest, AClientThrowsWhatItWasRefusedFor) {
  Server server("tcp://127.0.0.1:0", {});
  Client client(server.endpoint(), {}, "the coordinator");
  client.send(heartbeat(), soon());
  auto received = server.receive(soon());
  ASSERT_TRUE(received);
  proto::Envelope refused;
  refused.mutable_refused()->set_reason("the run is full");
  server.send(received->peer, refused);
  EXPECT_THAT(error_of<PeerError>([&] { client.receive(soon()); }), HasSubstr("the run is full"));
  EXPECT_THAT(error_of<PeerError>([&] { client.receive(soon()); }), HasSubstr("the run is full"));
}

}  // namespace
}  // namespace muster
