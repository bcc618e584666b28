// Run keys: who is let in, who is not, and what they are told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <zmq.hpp>

#include "common/transport/socket.h"
#include "common/transport/transport_testing.h"

namespace muster {
namespace {

using testing::HasSubstr;

// The server's word on it may arrive after the client's.
void expect_refusals(Server* server) {
  const Deadline deadline = soon();
  while (server->refused_count() == 0 && !deadline.passed()) {
    EXPECT_FALSE(server->receive(Deadline::after(std::chrono::milliseconds(10))));
  }
  EXPECT_GT(server->refused_count(), 0);
}

TEST(SecurityTest, TheRightKeyIsAdmitted) {
  const Security security{generate_run_key()};
  Server server("tcp://127.0.0.1:0", security);
  expect_still_serving(&server, security);
  EXPECT_EQ(server.refused_count(), 0);
}

TEST(SecurityTest, AWrongKeyIsSaidInsideTheDeadline) {
  Server server("tcp://127.0.0.1:0", Security{generate_run_key()});
  {
    Serving serving(&server);
    Client client(server.endpoint(), Security{generate_run_key()}, "the coordinator");
    const std::string error = error_of<PeerError>([&] { client.call(status_request(), soon()); });
    EXPECT_THAT(error, HasSubstr("run key is wrong"));
    EXPECT_THAT(error, HasSubstr(server.endpoint()));
    EXPECT_THAT(error_of<PeerError>([&] { client.send(heartbeat(), soon()); }),
                HasSubstr("run key is wrong"));
  }
  expect_refusals(&server);
}

TEST(SecurityTest, NoKeyAgainstAKeyIsSaid) {
  Server server("tcp://127.0.0.1:0", Security{generate_run_key()});
  Serving serving(&server);
  Client client(server.endpoint(), {}, "the coordinator");
  EXPECT_THAT(error_of<PeerError>([&] { client.call(status_request(), soon()); }),
              HasSubstr("asks for a run key"));
}

TEST(SecurityTest, AKeyAgainstNoKeyIsSaid) {
  Server server("tcp://127.0.0.1:0", {});
  Serving serving(&server);
  Client client(server.endpoint(), Security{generate_run_key()}, "the coordinator");
  EXPECT_THAT(error_of<PeerError>([&] { client.call(status_request(), soon()); }),
              HasSubstr("no run key"));
}

// Knows the server's public key (it is no secret from who once held it) but has another key pair:
// only the ZAP handler stands in the way.
TEST(SecurityTest, TheZapHandlerRefusesAForeignKeyPair) {
  const Security security{generate_run_key()};
  Server server("tcp://127.0.0.1:0", security);
  std::array<char, 41> server_key{};
  ASSERT_EQ(zmq_curve_public(server_key.data(), security.run_key.c_str()), 0);
  std::array<char, 41> public_key{};
  std::array<char, 41> secret_key{};
  ASSERT_EQ(zmq_curve_keypair(public_key.data(), secret_key.data()), 0);
  zmq::context_t context;
  zmq::socket_t raw(context, zmq::socket_type::dealer);
  raw.set(zmq::sockopt::linger, 0);
  raw.set(zmq::sockopt::curve_serverkey, server_key.data());
  raw.set(zmq::sockopt::curve_publickey, public_key.data());
  raw.set(zmq::sockopt::curve_secretkey, secret_key.data());
  raw.connect(server.endpoint());
  proto::Envelope envelope = heartbeat();
  envelope.set_version(kProtocolVersion);
  envelope.set_build("x");
  raw.send(zmq::buffer(envelope.SerializeAsString()), zmq::send_flags::none);
  expect_refusals(&server);
  expect_still_serving(&server, security);
}

TEST(SecurityTest, WithoutAZapHandlerNobodyIsAdmitted) {
  const Security security{generate_run_key()};
  zmq::context_t context;
  zmq::socket_t server(context, zmq::socket_type::router);
  transport::configure(&server, {});
  transport::secure(&server, security, /*server=*/true);
  server.set(zmq::sockopt::rcvtimeo, 300);
  server.bind("tcp://127.0.0.1:0");
  Client client(server.get(zmq::sockopt::last_endpoint), security, "the coordinator");
  client.send(heartbeat(), soon());
  zmq::message_t frame;
  EXPECT_FALSE(server.recv(frame));
}

TEST(SecurityTest, ABareServerStaysOnThisMachine) {
  EXPECT_THAT(error_of<ConfigError>([] { Server server("tcp://*:0", {}); }),
              HasSubstr("without a run key"));
  Server server("tcp://*:0", Security{generate_run_key()});
  EXPECT_GT(port_of(server.endpoint()), 0);
}

TEST(SecurityTest, EndpointsThatReachBeyondThisMachine) {
  for (const char* far : {"tcp://*:29400", "tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "tcp://host:1",
                          "tcp://[::]:1", "tcp://eth0:1", "tcp://*"}) {
    EXPECT_TRUE(reaches_beyond_this_machine(far)) << far;
  }
  for (const char* near : {"tcp://127.0.0.1:0", "tcp://127.1.2.3:5", "tcp://localhost:1",
                           "tcp://[::1]:1", "ipc://@name", "inproc://x"}) {
    EXPECT_FALSE(reaches_beyond_this_machine(near)) << near;
  }
}

class RunKeyFileTest : public testing::Test {
 protected:
  RunKeyFileTest() : path_(testing::TempDir() + "/run_key_" + std::to_string(getpid())) {}
  ~RunKeyFileTest() override { unlink(path_.c_str()); }
  void write_key(const std::string& text, mode_t mode) {
    std::ofstream(path_) << text;
    ASSERT_EQ(chmod(path_.c_str(), mode), 0);
  }
  std::string path_;
};

TEST_F(RunKeyFileTest, IsRead) {
  const std::string key = generate_run_key();
  EXPECT_EQ(key.size(), 40u);
  EXPECT_NE(key, generate_run_key());
  write_key(key + "\n", 0600);
  EXPECT_EQ(read_run_key(path_), key);
}

TEST_F(RunKeyFileTest, MustBeThereAndPrivate) {
  EXPECT_THAT(error_of<IoError>([&] { read_run_key(path_); }), HasSubstr(path_));
  write_key(generate_run_key(), 0644);
  EXPECT_THAT(error_of<IoError>([&] { read_run_key(path_); }), HasSubstr("chmod 600"));
}

TEST_F(RunKeyFileTest, MustHoldAKey) {
  write_key("short", 0600);
  EXPECT_THAT(error_of<ConfigError>([&] { read_run_key(path_); }), HasSubstr("40 characters"));
  write_key("", 0600);
  EXPECT_THAT(error_of<IoError>([&] { read_run_key(path_); }), HasSubstr(path_));
}

}  // namespace
}  // namespace muster
